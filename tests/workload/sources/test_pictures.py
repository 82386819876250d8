"""Pictures are drawn whatever becomes of the processes that draw them."""

import multiprocessing
import os
import signal
import time

import pytest

from hydrainfer.workload.sources.pictures import DrawingStopped, DrawnPicture, data_urls

pytestmark = [pytest.mark.multi, pytest.mark.timeout(60)]


class Signalled(DrawnPicture, frozen=True, tag="signalled"):
    """The process that draws it gets a signal, as from Ctrl-C or `timeout`."""

    kill: int = signal.SIGINT

    def data_url(self) -> str:
        if multiprocessing.parent_process() is not None:
            os.kill(os.getpid(), self.kill)
        return super().data_url()


@pytest.mark.parametrize("kill", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_whole_group(kill, capfd):
    many = [Signalled(seed=i, width=8, height=8, kill=int(kill)) for i in range(64)]
    assert data_urls(many) == [DrawnPicture(i, 8, 8).data_url() for i in range(64)]
    assert "Traceback" not in capfd.readouterr().err


class Slow(DrawnPicture, frozen=True, tag="slow"):
    def data_url(self) -> str:
        time.sleep(0.5)
        return super().data_url()


def test_drawing_stops_when_it_is_given_up():
    begin_s = time.monotonic()
    with pytest.raises(DrawingStopped):
        data_urls([Slow(seed=i, width=8, height=8) for i in range(400)], lambda: True)
    assert time.monotonic() - begin_s < 40.0  # all of them: 200 s of sleep on one core
