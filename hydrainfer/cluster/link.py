"""One end of the connection between two processes: numbers, mail that waits, when the other was last heard. Pure."""

from __future__ import annotations

from hydrainfer.cluster.messages import HubOrder, Orders


class Link:
    """The connection to one incarnation. Messages are numbered from 1 in each direction, so a gap shows that one was
    lost. `n_heard`: the number of the last message heard. `heard_s`: when it came, on the caller's clock."""

    def __init__(self, incarnation: int, now: float) -> None:
        self.incarnation = incarnation
        self.n_heard = 0
        self.heard_s = now
        self._n_sent = 0
        self._mail: list[HubOrder] = []

    def post(self, order: HubOrder) -> None:
        """Keep an order for the next message."""
        self._mail.append(order)

    def message(self, now: float) -> Orders | None:
        """The orders that wait, as the next message; None if there are none."""
        if not self._mail:
            return None
        orders = tuple(self._mail)
        self._mail.clear()
        return Orders(self.incarnation, now, orders, self.number())

    def number(self) -> int:
        """The number of the message that is sent now."""
        self._n_sent += 1
        return self._n_sent

    def hear(self, number: int, now: float) -> bool:
        """Note a message (0: it has no number). Returns False if one before it was lost."""
        self.n_heard += 1
        if number and number != self.n_heard:
            return False
        self.heard_s = now
        return True

    def excuse(self, late_s: float, now: float) -> None:
        """Do not count `late_s`, by which the caller is late, as silence: the whole machine may have been paused."""
        self.heard_s = min(now, self.heard_s + late_s)


Links = dict[str, Link]
"""The links of a process, by the name of the other."""
