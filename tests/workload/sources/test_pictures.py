"""Pictures are drawn whatever becomes of the processes that draw them."""

import multiprocessing
import os
import signal

import pytest

from hydrainfer.workload.sources.pictures import DrawnPicture, data_urls

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
