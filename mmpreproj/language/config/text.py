"""Which text a language model is trained on and evaluated on; `documents` reads it, `packing` packs it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from mmpreproj.training.config.section import Names, Section


class SplitNames(Section):
    """What a data set calls its splits.

    A part of a split is written as the library `datasets` does, `train[:10000]` or `train[:5%]`.

    Attributes:
        train: the split that is trained on.
        validation: the split that settings are chosen by.
        test: the split that results are reported on.
    """

    train: str = "train"
    validation: str = "validation"
    test: str = "test"


class TextSource(Section):
    """Text: a data set, or files.

    Attributes:
        dataset: a data set of the hub or a folder, as the library `datasets` takes it or its `save_to_disk` wrote it.
        subset: the data set's configuration, where it has several.
        revision: the data set's branch, tag or commit on the hub.
        splits: what the data set calls its splits; those of the usual names that it does not have are taken from
            train.
        files: paths, or patterns such as `docs/**/*.rst`, relative to where the command runs. A file .jsonl, .json,
            .csv or .parquet has a document in each row; any other is one document, in UTF-8.
        column: the column with the documents, of a data set or of files with rows.
        document_separator: a string that stands between the documents of a text file, and belongs to none; write
            `"\\n\\n"` in double quotes for an empty line. None makes each file one document.
        held_out: share of the text, by characters, that is held out for validation, and as much again for test, where
            the source has no such splits. Documents are drawn by a hash of their text, so that copies of a document
            land on one side, and as whole ones, so that the share is rough.
        split_seed: of that draw and of the order in which documents are packed.
        separator: what stands between documents: `eos`, the tokenizer's end-of-text token after each; or `none`, for
            rows that are pieces of one running text, as wikitext's lines are: they are joined in the order they have,
            and the end of the text is what is held out.
    """

    also_called: ClassVar[Mapping[str, str]] = {
        "dataset_name": "dataset",
        "path": "dataset",
        "dataset_config_name": "subset",
        "config_name": "subset",
        "data_files": "files",
        "train_file": "files",
        "text_column": "column",
        "text_field": "column",
        "validation_split_percentage": "held_out",
        "seed": "split_seed",
    }

    dataset: str | None = None
    subset: str | None = None
    revision: str | None = None
    splits: SplitNames = SplitNames()
    files: Names = ()
    column: str = "text"
    document_separator: str | None = Field(default=None, min_length=1)
    held_out: float = Field(default=0.1, gt=0, lt=0.5)
    split_seed: int = Field(default=0, ge=0, lt=2**63)
    separator: Literal["eos", "none"] = "eos"

    @model_validator(mode="after")
    def _is_a_data_set_or_files(self) -> TextSource:
        if bool(self.dataset) == bool(self.files):
            found = "both" if self.dataset else "neither"
            raise ValueError(
                f"give dataset, a hub id or a folder, or files, paths or patterns such as docs/*.txt; got {found}"
            )
        kind, foreign = (
            ("dataset", ("document_separator",)) if self.dataset else ("files", ("subset", "revision", "splits"))
        )
        # By value: a file that was written names every field.
        for name in foreign:
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} has no meaning for {kind}; leave it out")
        return self
