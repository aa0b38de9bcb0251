"""Download datasets and convert common dataset layouts: `tvr data download` and `tvr data import`."""

from tvr_lightning.errors import UserError


class ImportFailed(UserError):  # noqa: N818  reads as what happened
    """Error for files to import that cannot be recognized, read, or written to their target."""

    exit_status = 2  # 1 is the status of an import with missing videos
