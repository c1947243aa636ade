"""The JSON Schema of a study's configuration.

`python -m mmpreproj.language.config.schema configs/study.schema.json` writes the file.
"""

from __future__ import annotations

from typing import Any

from mmpreproj.language.config.study import StudyConfig
from mmpreproj.training.config.schema import json_schema, write_as_asked


def study_schema() -> dict[str, Any]:
    """Describe a study's configuration as JSON Schema, draft 2020-12."""
    return json_schema(StudyConfig, name="study.schema.json", title="Configuration of a study of mmpreproj")


if __name__ == "__main__":
    write_as_asked(study_schema(), module="mmpreproj.language.config.schema")
