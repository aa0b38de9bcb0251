"""CsvDataset: a table of captions and a folder of videos, as a minimal dataset."""

from pathlib import Path

from tvr_lightning.data.base import TextVideoDataModule
from tvr_lightning.data.records import Findings, Split, SplitName, read_table


class CsvDataset(TextVideoDataModule):
    """Videos with captions in captions.csv; every caption of a test video is a query."""

    title = "CSV"
    directory = "csv"
    layout = "$TVR_DATA/csv/\n  captions.csv    columns split, video, caption\n  videos/<video> ..."
    has_official_validation = False
    one_caption_evaluation = False

    def required_files(self, name: SplitName) -> list[Path]:
        """Return the annotation files of a split."""
        return [self.folder / "captions.csv"]

    def parse_split(self, name: SplitName, findings: Findings) -> Split:
        """Read a split."""
        (table,) = self.required_files(name)
        captions: dict[str, list[str]] = {}
        for row in read_table(table, ["split", "video", "caption"]):
            if row["split"] == name:
                captions.setdefault(row["video"], []).append(row["caption"])
        return self.build_split(name, "all captions of a video as queries", captions, findings, table)
