"""Point clouds from prompts with the mmpreproj adapter's point path, as a diffusers custom pipeline.

    DiffusionPipeline.from_pretrained(folder, custom_pipeline="pipelines/shapes.py", trust_remote_code=True)

mmpreproj must be installed; this file only names the class.
"""

from mmpreproj.pipelines.shapes import PreProjShapePipeline

__all__ = ["PreProjShapePipeline"]
