"""JSON lists of captions as on the Hub and in many code bases, with a record per video or per caption."""

from __future__ import annotations

from pathlib import Path

from tvr_lightning.data.records import expect, field_of, malformed, read_json
from tvr_lightning.data.video_files import stem


def read_hub_list(file: Path) -> dict[str, list[str]]:
    """Return the captions of every video of a list `[{"video": ..., "caption": ...}, ...]`, in file order.

    A record identifies its video by `video_id`, or by its file under `video`. Its `caption` is one caption or a list of
    captions; `sentences`, as in ActivityNet, are used instead if present. Records of one video are merged.
    """
    captions: dict[str, list[str]] = {}
    for number, record in enumerate(expect(file, "top level", read_json(file), list, "write a list of records")):
        entry = f"[{number}]"
        expect(file, entry, record, dict, 'write {"video": ..., "caption": ...}')
        name = record.get("video_id") or stem(Path(field_of(file, entry, record, "video", str)).name)
        said = record["sentences"] if "sentences" in record else field_of(file, entry, record, "caption", object)
        found = captions.setdefault(expect(file, f"{entry}, video_id", name, str, "write a name"), [])
        for text in said if isinstance(said, list) else [said]:
            found.append(expect(file, f"{entry}, caption", text, str, "write a caption or a list of captions"))
    return captions


def read_pairs(file: Path) -> dict[str, str]:
    """Return the only caption of every video of a list; several captions of a video are an error."""
    captions = read_hub_list(file)
    for video, texts in captions.items():
        if len(texts) != 1:
            message = f"{len(texts)} captions, but the protocol has one per video"
            raise malformed(file, video, message, "use the list of the protocol's pairs")
    return {video: texts[0].strip() for video, texts in captions.items()}


def read_paragraphs(file: Path) -> dict[str, str]:
    """Return the captions of every video of a list as one paragraph."""
    return {video: " ".join(text.strip() for text in texts) for video, texts in read_hub_list(file).items()}
