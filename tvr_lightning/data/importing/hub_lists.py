"""JSON lists of captions as on the Hub and in many code bases, with a record per video or per caption."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tvr_lightning.data.importing.names import stem
from tvr_lightning.data.records import expect, field_of, malformed, read_json


def read_hub_list(file: Path) -> dict[str, list[str]]:
    """Return the captions of every video of a list `[{"video": ..., "caption": ...}, ...]`, in file order.

    A record identifies its video by `video_id`, or by its file under `video`. Its `caption` is one caption or a list of
    captions; `sentences`, as in ActivityNet, are used instead if present. Records of one video are merged.

    Raises:
        AnnotationError: The file is not such a list.
    """
    captions: dict[str, list[str]] = {}
    for number, record in enumerate(expect(file, "top level", read_json(file), list, "write a list of records")):
        entry = f"[{number}]"
        expect(file, entry, record, dict, 'write {"video": ..., "caption": ...}')
        name = record.get("video_id") or stem(Path(field_of(file, entry, record, "video", str)).name)
        said = record["sentences"] if "sentences" in record else _caption(file, entry, record)
        found = captions.setdefault(expect(file, f"{entry}, video_id", name, str, "write a name"), [])
        for text in said if isinstance(said, list) else [said]:
            found.append(expect(file, f"{entry}, caption", text, str, "write a caption or a list of captions"))
    return captions


def _caption(file: Path, entry: str, record: dict[str, Any]) -> Any:
    if "caption" not in record:
        raise malformed(file, entry, f"the key 'caption' is missing, found {sorted(record)}", "add the key 'caption'")
    return record["caption"]


def single(file: Path, captions: dict[str, list[str]], joined: bool = False) -> dict[str, str]:
    """Return one text per video.

    Args:
        file: Source of the captions, for messages.
        captions: Captions of each video.
        joined: Whether several captions are joined to a paragraph. Otherwise they are an error.

    Raises:
        AnnotationError: A video has several captions and `joined` is off.
    """
    for video, texts in captions.items():
        if len(texts) != 1 and not joined:
            message = f"{len(texts)} captions, but the protocol has one per video"
            raise malformed(file, video, message, "use the list of the protocol's pairs")
    return {video: " ".join(text.strip() for text in texts) for video, texts in captions.items()}
