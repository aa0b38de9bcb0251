"""Hooks of MkDocs: add pages from outside docs/, and make links between repository files work in the site."""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)(?P<target>[^)#\s]+)(?P<anchor>#[^)\s]+)?(?=\))")


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add the README as the home page, other pages of the repository, and the measurements."""
    added = {"index.md": "README.md", "changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}
    added = {uri: ROOT / name for uri, name in added.items()}
    results = ROOT / "benchmarks" / "results"
    added |= {path.relative_to(ROOT).as_posix(): path for kind in ("md", "svg") for path in results.rglob(f"*.{kind}")}
    for uri, path in added.items():
        files.append(File.generated(config, uri, abs_src_path=str(path)))


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links at the pages of the site, or at the repository for files that are not in the site."""
    source = Path(str(page.file.abs_src_path))
    uris = {Path(str(file.abs_src_path)): file.src_uri for file in files if file.abs_src_path}

    def rewritten(link: re.Match[str]) -> str:
        target, anchor = (source.parent / link["target"]).resolve(), link["anchor"] or ""
        if target in uris:
            return posixpath.relpath(uris[target], posixpath.dirname(page.file.src_uri)) + anchor
        if target.exists():
            return f"{config.repo_url}/blob/HEAD/{target.relative_to(ROOT).as_posix()}{anchor}"
        return link[0]  # MkDocs reports it

    return LINK.sub(rewritten, markdown).replace("URL_OF_THIS_REPOSITORY", str(config.repo_url))
