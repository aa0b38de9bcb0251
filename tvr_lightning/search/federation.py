"""Several indexes asked at once: of this machine or behind other servers; those that do not answer are named."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import hashlib
import itertools
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from tvr_lightning.search.engine import EXAMPLE_QUERIES, Searcher
from tvr_lightning.search.errors import SearchError, UnknownVideoError
from tvr_lightning.search.filters import Filter
from tvr_lightning.search.local import LocalIndex
from tvr_lightning.search.merging import comparable, merge
from tvr_lightning.search.ranking import Example
from tvr_lightning.search.results import Answer
from tvr_lightning.search.source import ExampleKind, Passed, SearchRequest, SlowError, Source, UnansweredError
from tvr_lightning.search.texts import GivenUp, never

T = TypeVar("T")
TAG = 8
"""Hexadecimal digits that stand before an id, and say whose it is."""
AT_ONCE = 16
"""Requests to one index that are under way at once; those of one that hangs keep none of the others waiting."""
REST = 30.0
"""Seconds for which an index that did not answer in time is not asked again."""

MOST_PATIENCE = 600.0


@dataclass
class _Member:
    """One of the indexes, with threads of its own.

    Attributes:
        source: answers.
        tag: what its ids begin with.
        pool: asks it.
        rests_until: moment before which it is not asked, for it did not answer lately.
    """

    source: Source
    tag: str
    pool: ThreadPoolExecutor
    rests_until: float = 0.0

    @property
    def rests(self) -> bool:
        """Whether it is not asked now."""
        return time.monotonic() < self.rests_until

    def rest(self) -> None:
        """Leave it in peace for a while, unless it is on this machine, where it is busy and nothing worse."""
        if not isinstance(self.source, LocalIndex):
            self.rests_until = time.monotonic() + REST


@dataclass
class _Heard(Generic[T]):
    """What was answered.

    Attributes:
        answers: of those that answered, in the order of the indexes.
        silent: names of the others, with a sentence each.
    """

    answers: list[tuple[_Member, T]] = field(default_factory=list)
    silent: list[tuple[str, SearchError]] = field(default_factory=list)


class Federation(Source):
    """Several indexes as one.

    Ids of videos are those of their index behind `TAG` digits that are drawn from its name, so that they stay the same
    whatever else is asked.

    Args:
        sources: the indexes; they are closed with this one.
        patience: seconds that each may take to answer; the others answer without it.

    Raises:
        SearchError: none, or the same one twice.
    """

    def __init__(self, sources: Sequence[Source], patience: float) -> None:
        self.name, self.patience = "several indexes", patience
        if len({source.name for source in sources}) < len(sources):
            twice = next(name for name, count in Counter(source.name for source in sources).items() if count > 1)
            raise SearchError(f"--index {twice} is given twice; name every index once")
        self.members = [
            _Member(source, _tag(source.name), ThreadPoolExecutor(AT_ONCE, f"tvr-index-{place}"))
            for place, source in enumerate(sources)
        ]
        self._by_tag = {member.tag: member for member in self.members}

    def close(self) -> None:
        """Close all indexes."""
        for member in self.members:
            member.pool.shutdown(wait=False, cancel_futures=True)
            member.source.close()

    def require_alike(self) -> list[str]:
        """Check that the weights of all indexes that answer are the same.

        Returns:
            A sentence for each that does not answer.

        Raises:
            SearchError: two were made with different weights, or no index answers.
        """
        heard = self._states()
        if not heard.answers:
            raise _refusal(heard)
        known = heard.answers[0]
        for member, state in heard.answers[1:]:
            first, other = known[1]["scorers"][0], state["scorers"][0]
            for name in dict.fromkeys((first, *(set(known[1]["weights"]) & set(state["weights"])))):
                made, here = known[1]["weights"][name], state["weights"].get(name)
                if first != other or made != here:
                    raise SearchError(
                        f"--index {member.source.name} was made with other weights than {known[0].source.name} "
                        f"({other} {state['weights'][other]}, {first} {known[1]['weights'][first]}), so that scores do "
                        "not compare; serve it by itself"
                        if name == first
                        else f"--index {member.source.name} has another {name} than {known[0].source.name} ({here}, "
                        f"{made}), so that scores do not compare; serve it by itself"
                    )
        return [str(error) for _, error in heard.silent]

    def ready(self) -> None:
        """Requests are answered whatever the indexes do, and say which do not answer."""

    def count(self) -> int:
        """Return how many videos the indexes of this machine have."""
        return sum(member.source.count() for member in self.members)

    def state(self) -> dict[str, Any]:
        """Return what is indexed in all, which scorers all have, and which indexes there are.

        Raises:
            UnansweredError: no index answers.
        """
        heard = self._states()
        states = [state for _, state in heard.answers]
        if not states:
            raise UnansweredError(_sentences(heard))
        ideas = itertools.chain.from_iterable(itertools.zip_longest(*(state["examples"] for state in states)))
        counts = {member.source.name: state["videos"] for member, state in heard.answers}
        problems = {name: str(error) for name, error in heard.silent}
        names = [name for name in states[0]["scorers"] if all(name in state["scorers"] for state in states)]
        return {
            "videos": sum(counts.values()),
            "scorers": names,
            "weights": {name: states[0]["weights"][name] for name in names},
            "normalize": ["none"],
            "captioned": sum(state["captioned"] for state in states),
            "examples": list(dict.fromkeys(filter(None, ideas)))[:EXAMPLE_QUERIES],
            "skipped": sum(state["skipped"] for state in states),
            "store": "several",
            "indexes": [
                {"name": name, "videos": counts.get(name, 0), "problem": problems.get(name, "")}
                for name in (member.source.name for member in self.members)
            ],
        }

    def search(self, asked: SearchRequest) -> Answer:
        """Ask all indexes and merge what they answer.

        Raises:
            SearchError: the request is none that several indexes can serve.
            UnansweredError: no index answers, or not the one that holds an example.
        """
        if asked.normalize != "none":
            raise SearchError(
                f"normalize: {asked.normalize} balances the videos of one index against one another; drop it, or ask "
                "that index alone"
            )
        if asked.threshold is not None and not (0 <= asked.threshold <= 1 and asked.query.strip()):
            raise SearchError("threshold must lie in 0..1, and is of words; an example has no scale")

        def ask(member: _Member) -> Answer:
            like, unlike = ([_to(member, each) for each in examples] for examples in (asked.like, asked.unlike))
            wanted = dataclasses.replace(asked, threshold=None, like=like, unlike=unlike, evidence=True)
            return member.source.search(wanted)

        heard = self._ask(self.members, ask)
        for member, answer in heard.answers:
            for result in answer.results:
                result.id, result.index = member.tag + result.id, member.source.name
        kept, others = comparable([(member.source.name, answer) for member, answer in heard.answers])
        if not kept:
            raise _refusal(heard)
        merged = merge(kept, asked.top, asked.threshold, bool(asked.query.strip()))
        silent = [(name, str(error)) for name, error in heard.silent] + others
        merged.unanswered = [name for name, _ in silent] + merged.unanswered
        merged.notes = [sentence for _, sentence in silent] + merged.notes
        if not asked.evidence:
            merged.evidence = None
        return merged

    def read(self, path: Path, kind: ExampleKind, name: str) -> Example:
        """Have a file read as an example by the first index that can: one of this machine, where there is one.

        Raises:
            MediaError: it cannot be decoded.
            SearchError: no index can read it.
        """
        here = sorted(self.members, key=lambda member: not isinstance(member.source, LocalIndex))
        errors: list[SearchError] = []
        for member in here:
            try:
                return member.source.read(path, kind, name)
            except UnansweredError as error:
                errors.append(error)
        raise UnansweredError("; ".join(map(str, errors)))

    def example(self, video: str) -> Example:
        """Return a video as an example.

        Raises:
            UnknownVideoError: no such video.
            UnansweredError: its index does not answer.
        """
        return dataclasses.replace(self._of(video, lambda source, own: source.example(own)), video=video)

    def library(self, only: Filter, top: int, after: int) -> dict[str, Any]:
        """List videos, one index after the other, each as it lists them itself.

        Raises:
            UnansweredError: no index answers.
        """
        heard = self._ask(self.members, lambda member: member.source.library(only, 1, 0)["count"])
        if not heard.answers:
            raise _refusal(heard)
        parts: dict[str, tuple[int, int]] = {}
        begin = 0
        for member, count in heard.answers:
            first, last = max(after - begin, 0), min(after + top - begin, count)
            if first < last:
                parts[member.tag] = (last - first, first)
            begin += count
        chosen = [member for member in self.members if member.tag in parts]
        listed = self._ask(chosen, lambda member: member.source.library(only, *parts[member.tag])["videos"])
        videos = [
            {**video, "id": member.tag + video["id"], "index": member.source.name}
            for member, found in listed.answers
            for video in found
        ]
        return {"videos": videos, "count": begin}

    def facets(self) -> dict[str, Any]:
        """Count videos by folder and by length.

        Raises:
            UnansweredError: no index answers.
        """
        heard = self._ask(self.members, lambda member: member.source.facets())
        if not heard.answers:
            raise _refusal(heard)
        folders: Counter[str] = Counter()
        lengths: Counter[tuple[float, float | None]] = Counter()
        for _, facets in heard.answers:
            folders.update({each["folder"]: each["count"] for each in facets["folders"]})
            lengths.update({(each["shortest"], each["longest"]): each["count"] for each in facets["lengths"]})
        ordered = sorted(lengths.items(), key=lambda item: item[0][0])
        return {
            "folders": [{"folder": name, "count": count} for name, count in sorted(folders.items())],
            "lengths": [{"shortest": low, "longest": high, "count": count} for (low, high), count in ordered],
        }

    def about(self, video: str) -> dict[str, Any]:
        """Say what is known of one video.

        Raises:
            UnknownVideoError: no such video.
            UnansweredError: its index does not answer.
        """
        found = self._of(video, lambda source, own: {**source.about(own), "index": source.name})
        return {**found, "id": video}

    def file(self, video: str, wanted: Mapping[str, str]) -> Path | Passed:
        """Return the video itself, or what its server hands out of it.

        Raises:
            UnknownVideoError: no such video.
            UnansweredError: its index does not answer.
            SearchError: it may not be handed out.
        """
        member, own = self._owner(video)
        if member.rests:
            raise self._late(member)
        return member.source.file(own, wanted)  # a stream, which the time limit is not for

    def picture(self, video: str, time: float) -> bytes:
        """Return the indexed frame nearest to a time as JPEG.

        Raises:
            UnknownVideoError: no such video, or none of its pictures.
            UnansweredError: its index does not answer.
        """
        return self._of(video, lambda source, own: source.picture(own, time))

    def texts(self, video: str, top: int, given_up: GivenUp = never) -> list[dict[str, Any]]:
        """Return the texts of its index that fit a video, best first.

        Raises:
            SearchError: there are no texts.
            UnknownVideoError: no such video.
            UnansweredError: its index does not answer.
            GivenUpError: `given_up` said yes.
        """
        member, own = self._owner(video)
        return member.source.texts(own, top, given_up)  # which may take long, and says itself when nobody waits

    def _late(self, member: _Member) -> SlowError:
        return SlowError(f"{member.source.name} did not answer within {self.patience:g} s")

    def _states(self) -> _Heard[dict[str, Any]]:
        return self._ask(self.members, lambda member: member.source.state())

    def _owner(self, video: str) -> tuple[_Member, str]:
        member = self._by_tag.get(video[:TAG])
        if member is None:
            raise UnknownVideoError(f"no video {video!r} in any of the indexes")
        return member, video[TAG:]

    def _of(self, video: str, work: Callable[[Source, str], T]) -> T:
        """Ask the index that has a video.

        Raises:
            UnknownVideoError: no such video.
            UnansweredError: it does not answer in time.
        """
        member, own = self._owner(video)
        heard = self._ask([member], lambda member: work(member.source, own))
        if heard.silent:
            raise heard.silent[0][1]
        return heard.answers[0][1]

    def _ask(self, members: Sequence[_Member], work: Callable[[_Member], T]) -> _Heard[T]:
        """Ask some indexes at once; none is waited for longer than the patience."""
        asked: list[tuple[_Member, Future[T] | None]] = []
        for member in members:
            context = contextvars.copy_context()
            asked.append((member, None if member.rests else member.pool.submit(context.run, work, member)))
        wait([future for _, future in asked if future is not None], self.patience)
        heard: _Heard[T] = _Heard()
        for member, future in asked:
            name = member.source.name
            late = self._late(member)
            if future is None:
                heard.silent.append((name, late))
            elif not future.done():
                future.cancel()
                member.rest()
                heard.silent.append((name, late))
            else:
                try:
                    heard.answers.append((member, future.result()))
                except SearchError as error:
                    if isinstance(error, SlowError):
                        member.rest()
                    heard.silent.append((name, error))
        return heard


def open_indexes(
    indexes: Sequence[str],
    patience: float,
    device: str,
    store: str | None = None,
    trust: Sequence[str] = (),
    videos: Sequence[Path] = (),
    public: bool = True,
) -> tuple[Source, list[str]]:
    """Open one index, or several as one.

    Args:
        indexes: folders, and addresses of other servers.
        patience: seconds that each of several may take to answer.
        device: where the methods of the folders' indexes run.
        store: address of a single index's vectors, where they lie on another machine.
        trust: modules whose classes the checkpoints may name besides this package's.
        videos: files and folders whose videos may be handed out; none for those that this user indexed here.
        public: whether paths are told below the indexed folders only, and folders by their last part.

    Returns:
        What answers, and a sentence for each of several indexes that does not answer now.

    Raises:
        SearchError: an address or an index that cannot be used, different weights, or none that answers.
    """
    from tvr_lightning.search.remote import RemoteIndex, is_address

    if not 0 < patience <= MOST_PATIENCE:
        raise SearchError(f"--patience is {patience:g}; it must lie above 0 and be at most {MOST_PATIENCE:g} seconds")
    if len(indexes) == 1 and not is_address(indexes[0]):
        return LocalIndex(Searcher(indexes[0], device, store, trust), videos, public=public), []
    if store is not None:
        raise SearchError("--store says where the vectors of one index lie; drop it, or name one --index")
    with contextlib.ExitStack() as undo:
        searchers: list[Searcher] = []
        sources: list[Source] = []
        for index in indexes:
            if is_address(index):
                sources.append(RemoteIndex(index, patience))
                continue
            searchers.append(undo.enter_context(Searcher(index, device, None, trust, searchers)))
            folder = Path(index).resolve()
            name = index
            if public:
                same = sum(source.name.partition(" (")[0] == folder.name for source in sources)
                name = f"{folder.name} ({same + 1})" if same else folder.name
            sources.append(LocalIndex(searchers[-1], videos, name, public))
        made = Federation(sources, patience)
        silent = made.require_alike()
        undo.pop_all()
    return made, silent


def _tag(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:TAG]


def _to(member: _Member, example: Example) -> Example:
    """Return an example as one index knows it: by its own id, or by its features alone."""
    own = example.video[TAG:] if example.video is not None and example.video[:TAG] == member.tag else None
    return dataclasses.replace(example, video=own)


def _sentences(heard: _Heard[Any]) -> str:
    return "; ".join(dict.fromkeys(str(error) for _, error in heard.silent))


def _refusal(heard: _Heard[Any]) -> SearchError:
    """Return why no index answers: because of the request, or of the indexes."""
    said = _sentences(heard)
    silent = any(isinstance(error, UnansweredError) for _, error in heard.silent)
    return UnansweredError(said) if silent else SearchError(said)
