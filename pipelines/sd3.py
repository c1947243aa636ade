"""Stable Diffusion 3 with the mmpreproj adapter, as a diffusers custom pipeline.

    DiffusionPipeline.from_pretrained(folder, custom_pipeline="pipelines/sd3.py", trust_remote_code=True)

mmpreproj must be installed; this file only names the class.
"""

from mmpreproj.pipelines.sd3 import PreProjSD3Pipeline

__all__ = ["PreProjSD3Pipeline"]
