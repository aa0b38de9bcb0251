"""JSON lists of captions as on the Hub and in many code bases, with a record per video or per caption."""

from __future__ import annotations

from pathlib import Path

from tvr_lightning.data.records import expect, malformed, read_json
from tvr_lightning.data.video_files import stem


def read_hub_list(file: Path) -> dict[str, list[str]]:
    """Return the captions of every video of a list `[{"video": ..., "caption": ...}, ...]`, in file order.

    A record identifies its video by `video_id`, or by its file under `video`. Its `caption` is one caption or a list of
    captions; `sentences`, as in ActivityNet, are used instead if present. Records of one video are merged.
    """
    captions: dict[str, list[str]] = {}
    for number, record in enumerate(read_json(file, [dict])):
        entry = f"[{number}]"
        key = "sentences" if "sentences" in record else "caption"
        name = record.get("video_id") or stem(Path(expect(file, entry, record, {"video": str})["video"]).name)
        texts = expect(file, entry, record, {key: object})[key]
        found = captions.setdefault(expect(file, f"{entry}, video_id", name, str), [])
        found += expect(file, f"{entry}, {key}", texts if isinstance(texts, list) else [texts], [str])
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
