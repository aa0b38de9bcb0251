"""MSVD: short YouTube clips with about forty captions each."""

import io
import pickle
from pathlib import Path
from typing import Any, Literal, cast

from typing_extensions import override

from tvr_lightning.data.base import TextVideoDataModule
from tvr_lightning.data.records import Findings, Split, SplitName, expect, malformed, read_lines


class PlainUnpickler(pickle.Unpickler):
    """Unpickler of dicts, lists and strings, which rejects classes and functions and never calls them."""

    @override
    def find_class(self, module_name: str, global_name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module_name}.{global_name}; only dicts, lists and strings are read")


class MSVD(TextVideoDataModule):
    """MSVD (Chen and Dolan, "Collecting highly parallel data for paraphrase evaluation", ACL 2011), multi-caption.

    1,200 / 100 / 670 clips with 48,774 / 4,290 / 27,763 captions in the split and files of CLIP4Clip
    (`dataloader_msvd_retrieval.py`). All captions are used for training, and all captions of a test clip are queries;
    video-to-text retrieval uses the best caption of a clip. Captions are lists of tokens in a pickle, which is read
    without executing code.

    Args:
        split: "official" is the only choice.
        **options: options of all datasets (`TextVideoDataModule`).
    """

    title = "MSVD"
    directory = "msvd"
    layout = """\
$TVR_DATA/msvd/
  train_list.txt, val_list.txt, test_list.txt    one id per line
  raw-captions.pkl                               {"<id>": [["a", "man", ...], ...], ...}
  videos/<id>.avi ..."""
    suffix = ".avi"
    has_official_validation = True
    one_caption_evaluation = False  # all captions are queries

    def __init__(self, *, split: Literal["official"] = "official", **options: Any) -> None:
        super().__init__(split=split, **options)

    @override
    def required_files(self, name: SplitName) -> list[Path]:
        return [self.folder / f"{name}_list.txt", self.folder / "raw-captions.pkl"]

    @override
    def parse_split(self, name: SplitName, findings: Findings) -> Split:
        source, file = self.required_files(name)
        captions = {clip: [" ".join(tokens) for tokens in said] for clip, said in read_captions(file).items()}
        protocol = "all captions of a clip as queries"
        return self.build_split(name, protocol, captions, findings, source, file=file, ids=read_lines(source))


def read_captions(file: Path) -> dict[str, list[list[str]]]:
    """Return the captions of a pickle `{id: [[token, ...], ...]}`, and refuse one with executable objects."""
    try:
        captions = PlainUnpickler(io.BytesIO(file.read_bytes())).load()
    except Exception as error:  # damaged pickles can fail at any point
        fix = "use the raw-captions.pkl of CLIP4Clip's data package"
        raise malformed(file, "whole file", f"not a pickle of plain captions ({error})", fix) from error
    return cast("dict[str, list[list[str]]]", expect(file, "", captions, {str: [[str]]}))
