"""A snapshot of a Hugging Face repo in the hub's own cache: looked up once, then only the files that are needed.

`huggingface_hub` does the talking, and so honours HF_HOME, HF_ENDPOINT, HF_HUB_OFFLINE and HF_TOKEN. It is imported on
first use. Its retries and warnings are kept out of the way: one request, under a deadline, tells whether the hub is
there, and what goes wrong is said once, by us.
"""

import hashlib
import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from minisgl.host import aside
from minisgl.source.cache_folder import Report, require_free, watched
from minisgl.source.folder import CONFIG, check_folder, small_files, weight_index, weight_names
from minisgl.source.model_config import read_model_config

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo, RepoSibling

logger = logging.getLogger(__name__)


def snapshot(repo_id: str, revision: str | None, weights: bool, report: Report, timeout_s: float) -> Path:
    """The folder of a repo's files at a branch, tag or commit (None: the main branch).

    The architecture is checked before weights are downloaded, which `weights` asks for. If the hub cannot be reached
    within `timeout_s`, a complete snapshot in the cache is used. Raises ValueError or OSError; nothing broken is kept.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import OfflineModeIsEnabled

    with _quiet():
        report(f"looking up {repo_id}", 0, None)
        api = HfApi()
        try:
            # Name look-up and a host's many addresses know no time-out of their own.
            info = aside(
                lambda: api.model_info(repo_id, revision=revision, files_metadata=True, timeout=timeout_s), timeout_s
            )
        except Exception as error:  # of whatever HTTP library this huggingface_hub uses
            if (refusal := _refusal(error, repo_id, revision)) is not None:
                raise ValueError(refusal) from error
            level = logging.INFO if isinstance(error, OfflineModeIsEnabled) else logging.WARNING
            reason = f"{api.endpoint} cannot be reached ({_reason(error)})"
            return _cached(repo_id, revision, weights, reason, level)
        return _Download(repo_id, info, report).run(revision, weights)


class _Download:
    """The missing files of one snapshot, one after the other."""

    def __init__(self, repo_id: str, info: "ModelInfo", report: Report) -> None:
        if info.sha is None or info.siblings is None:
            raise ValueError(f"{repo_id}: the hub's answer names no commit or no files")
        self.repo_id, self.commit, self.report = repo_id, info.sha, report
        self.files = {file.rfilename: file for file in info.siblings}

    def run(self, revision: str | None, weights: bool) -> Path:
        """Download what is missing, and return the snapshot's folder."""
        if CONFIG not in self.files:
            weight_index(self.files, self.repo_id)  # most often the better complaint
            raise ValueError(f"{self.repo_id} has no {CONFIG}")
        folder = self._get(CONFIG, self.commit).parent
        read_model_config(folder, warn=False)
        index = weight_index(self.files, self.repo_id) if weights else None
        self._get_missing(folder, [*small_files(self.files), *([index] if index else [])])
        read_model_config(folder, warn=False)  # now with the generation config
        if weights:
            names = weight_names(folder, index)
            if missing := [name for name in names if name not in self.files]:
                raise ValueError(f"{self.repo_id} lacks {', '.join(missing)}, which {index} names")
            self._get_missing(folder, names)
        # The cache learns last which commit the revision is, so that it never points to an incomplete snapshot.
        if _in_cache(self.repo_id, revision) != folder:
            self._get(CONFIG, revision)
        return folder

    def _get_missing(self, folder: Path, names: list[str]) -> None:
        """Download and check what is not there yet, with the progress of all of it together."""
        missing = [name for name in names if not (folder / name).exists()]
        what, blobs = f"downloading {self.repo_id}", folder.parents[1] / "blobs"
        done_bytes, total_bytes = 0, sum(self.files[name].size or 0 for name in missing)
        require_free(blobs, total_bytes, what)
        for name in missing:
            with watched(self.report, what, total_bytes, blobs, "*.incomplete", done_bytes):
                path = self._get(name, self.commit)
            if not _intact(path, self.files[name]):
                path.resolve().unlink()
                path.unlink(missing_ok=True)  # a link to it, where the cache uses links
                raise ValueError(f"{name} of {self.repo_id} came with a wrong checksum and was removed: run again")
            done_bytes += self.files[name].size or 0
            self.report(what, done_bytes, total_bytes)

    def _get(self, name: str, revision: str | None) -> Path:
        """A file's place in the cache; downloaded if it is not there, or if `revision` is no commit and has moved."""
        from huggingface_hub import hf_hub_download

        try:
            return Path(hf_hub_download(self.repo_id, name, revision=revision))
        except Exception as error:  # of whatever HTTP library this huggingface_hub uses
            reason = _refusal(error, self.repo_id, revision) or _reason(error)
            raise ValueError(f"cannot download {name} of {self.repo_id}: {reason}; run again to go on") from error


def _intact(path: Path, file: "RepoSibling") -> bool:
    """Whether a file has the checksum the hub gave for it: SHA-256 for a large one, git's own for a small one."""
    if file.lfs is not None:
        with open(path, "rb") as content:
            return hashlib.file_digest(content, "sha256").hexdigest() == file.lfs.sha256
    blob = b"blob %d\0" % path.stat().st_size + path.read_bytes()
    return file.blob_id in (None, hashlib.sha1(blob).hexdigest())


def _in_cache(repo_id: str, revision: str | None) -> Path | None:
    """The folder of the snapshot that the cache knows for a revision; it may lack files."""
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(repo_id, CONFIG, revision=revision)
    return Path(config).parent if isinstance(config, str) else None


def _cached(repo_id: str, revision: str | None, weights: bool, reason: str, level: int) -> Path:
    """The snapshot that the cache has for a revision, if it is complete; else ValueError with the reason."""
    from huggingface_hub.constants import HF_HUB_CACHE

    folder = _in_cache(repo_id, revision)
    what = repo_id if revision is None else f"{repo_id} at {revision}"
    if folder is None:
        raise ValueError(f"{what}: {reason}, and it is not in the cache {HF_HUB_CACHE}")
    try:
        check_folder(folder, weights)
    except ValueError as error:
        raise ValueError(f"{what}: {reason}, and it is not complete in the cache: {error}") from error
    logger.log(level, "%s; using %s as it is in the cache", reason, what)
    return folder


def _refusal(error: BaseException, repo_id: str, revision: str | None) -> str | None:
    """What to tell the user where the hub did answer, but would not give; None if it could not be reached."""
    from huggingface_hub.errors import HfHubHTTPError, RevisionNotFoundError

    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, HfHubHTTPError):
        cause = cause.__cause__
    if isinstance(cause, RevisionNotFoundError):
        return f"{repo_id} has no branch, tag or commit {revision or 'main'}"
    status = 0 if cause is None else cause.response.status_code
    if not 400 <= status < 500 or status in (408, 429):  # not reached, failing or too busy
        return None
    reasons = {
        401: f"there is no repo {repo_id}, or it is private or gated (HTTP 401): check the name, or set HF_TOKEN",
        403: f"{repo_id} is gated (HTTP 403): accept its terms on its page, and set HF_TOKEN",
        404: f"there is no repo {repo_id} (HTTP 404)",
    }
    return reasons.get(status, f"the hub refuses {repo_id} (HTTP {status})")


def _reason(error: BaseException) -> str:
    """Why, in a few words: the innermost cause that says something."""
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set"
    if isinstance(error, HfHubHTTPError):
        return f"HTTP {error.response.status_code}"
    if error.__cause__ is not None:
        return _reason(error.__cause__)
    words = (getattr(error, "strerror", None) or str(error)).strip() or type(error).__name__
    return re.sub(r"^\[Errno -?\d+\] ", "", words.splitlines()[0])


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the hub library's own warnings and progress bars off the terminal."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    library = logging.getLogger("huggingface_hub")
    level, bars_were_off = library.level, are_progress_bars_disabled()
    library.setLevel(logging.CRITICAL)
    disable_progress_bars()
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        library.setLevel(level)
        if not bars_were_off:
            enable_progress_bars()
