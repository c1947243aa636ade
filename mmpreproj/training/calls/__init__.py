"""Training by a pipeline's own calls: for the families whose texts and latents the trainer does not prepare itself."""

from mmpreproj.training.calls.call import RecordedCall
from mmpreproj.training.calls.pictures import CalledPictures
from mmpreproj.training.calls.process import DiffusionProcess, FlowProcess, Process
from mmpreproj.training.calls.recording import record_call

__all__ = ["CalledPictures", "DiffusionProcess", "FlowProcess", "Process", "RecordedCall", "record_call"]
