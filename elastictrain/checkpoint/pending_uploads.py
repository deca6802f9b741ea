"""Uploads to S3 in several parts that were begun and never completed: their parts cost room, and are in no listing.

A writer that is killed leaves them behind. Only fsspec's client of S3 has a way to see them; other object stores drop
what was not completed by themselves (GCS after a week, Azure's uncommitted blocks likewise).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any


@dataclass(frozen=True, slots=True)
class PendingUpload:
    """An upload in parts that is not completed.

    Args:
        path: of the object to be, below the root that was asked for.
        key: likewise, as the server has it.
        upload_id: the server's name for it.
        began_at: by the server's clock.
    """

    path: str
    key: str
    upload_id: str
    began_at: datetime


def pending_uploads(fs: Any, root: str) -> Iterator[PendingUpload]:
    """Those below a root of an fsspec file system; none where it has no word for them. Raises what its client does."""
    if not hasattr(fs, "call_s3"):
        return
    bucket, prefix, _ = fs.split_path(root)
    prefix = f"{prefix}/" if prefix else ""
    marker: dict[str, str] = {}
    while True:
        page = fs.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=prefix, **marker)
        for upload in page.get("Uploads", []):
            key = upload["Key"]
            if key.startswith(prefix):
                yield PendingUpload(key.removeprefix(prefix), key, upload["UploadId"], upload["Initiated"])
        if not page.get("IsTruncated"):
            return
        marker = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}


def abort(fs: Any, root: str, upload: PendingUpload) -> None:
    """Has the server drop its parts. One that is gone by now is fine."""
    bucket, _, _ = fs.split_path(root)
    try:
        fs.call_s3("abort_multipart_upload", Bucket=bucket, Key=upload.key, UploadId=upload.upload_id)
    except FileNotFoundError:
        return
