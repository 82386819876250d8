"""Orders to all instances to forget what their caches could reuse, until each has answered or has died. Pure."""

from __future__ import annotations

from concurrent.futures import Future

from hydrainfer.cluster.link import Links
from hydrainfer.cluster.messages import Forget, Report
from hydrainfer.core import Forgotten, HydraError


class Forgetting:
    """The orders that are open. `links`: those to the instances that run. Used under the owner's lock."""

    def __init__(self, links: Links) -> None:
        self._links = links
        self._n = 0
        self._open: dict[int, tuple[Future[Forgotten], dict[str, int], Forgotten]] = {}  # with incarnations to wait for

    def begin(self) -> Future[Forgotten]:
        """Tell every instance that runs. The future has the numbers of blocks by cache and instance."""
        self._n += 1
        future: Future[Forgotten] = Future()
        future.set_running_or_notify_cancel()  # so that a caller that gives up cannot cancel it
        for link in self._links.values():
            link.post(Forget(self._n))
        self._open[self._n] = future, {name: link.incarnation for name, link in self._links.items()}, {}
        self.settle()
        return future

    def heard(self, report: Report) -> None:
        """Note a report, which may have answers."""
        for number, blocks in report.forgotten:
            if number in self._open:
                _, waits, answers = self._open[number]
                if waits.pop(report.name, None) is not None:
                    answers[report.name] = blocks
        self.settle()

    def settle(self) -> None:
        """Complete the orders that nobody has to answer any more. An instance that is gone has forgotten everything."""
        for number, (future, waits, answers) in list(self._open.items()):
            if all(not self._lives(name, incarnation) for name, incarnation in waits.items()):
                del self._open[number]
                future.set_result(answers)

    def end(self, error: HydraError) -> None:
        """Fail the orders that are open."""
        for future, _, _ in self._open.values():
            future.set_exception(error)
        self._open.clear()

    def _lives(self, name: str, incarnation: int) -> bool:
        link = self._links.get(name)
        return link is not None and link.incarnation == incarnation
