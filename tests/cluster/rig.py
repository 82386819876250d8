"""A hub with its instances, as the server has them."""

import socket
import threading
import time
from contextlib import closing

import pytest

from hydrainfer.cluster import Hub, Mesh, NodePlan, Pulse, ServerSide
from hydrainfer.config import read_layout
from hydrainfer.machine import host_identity
from tests.scheduler.fakes import expected_tokens, make_request
from tests.waiting import SOON_S


def speaks_ipv6():
    try:
        with closing(socket.socket(socket.AF_INET6)) as s:
            s.bind(("::1", 0))
    except OSError:
        return False
    return True


IPV6 = pytest.mark.skipif(not speaks_ipv6(), reason="no IPv6 here")


class Rig:
    """`shares`: by instance. `host`: where the hub believes to be. Used as a context, it closes."""

    def __init__(self, layout, launcher, folder, shares=(), host=None, timeout_s=60.0, pulse=None):
        specs = read_layout(layout)
        shares = dict(shares)
        host, pulse = host or host_identity(), pulse or Pulse()
        at = f"ipc://{folder}/"
        self.outputs, self.heard = [], threading.Condition()
        self.launcher = launcher
        self.side = ServerSide({s.name: s.role for s in specs}, self._sink, pulse=pulse)
        self.hub = Hub(self.side, Mesh(f"{at}hub"), launcher, {}.__getitem__, f"{at}pixels")
        self.hub._keeper._host = host
        shared = {"hub": self.hub.address, "pixels": self.hub.pixels_at, "bind": at + "{name}-{incarnation}"}
        shared |= {"n_instances": len(specs), "hub_host": host, "pulse": pulse}
        plans = [NodePlan(s.name, str(s.role), **shared, share=shares.get(s.name, s.share)) for s in specs]
        self.close_s = None
        start = time.monotonic()
        self.hub.start(plans, timeout_s)
        self.start_s = time.monotonic() - start

    def _sink(self, outputs):
        with self.heard:
            self.outputs += outputs
            self.heard.notify_all()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        start = time.monotonic()
        self.hub.close()
        self.close_s = time.monotonic() - start

    def submit(self, name, **kw):
        request = make_request(name, deadline_s=time.monotonic() + 60.0, **kw)
        self.hub.submit(request)
        return request

    def tokens(self, request, timeout_s=50.0):
        """All of its answer, once it has ended."""

        with self.heard:
            assert self.heard.wait_for(lambda: any(o.finish_reason for o in self.said(request)), timeout_s), request
            assert self.said(request)[-1].error is None, self.said(request)[-1]
            return [t for o in self.said(request) for t in o.token_ids]

    def said(self, request):
        return [o for o in self.outputs if o.request_id == request.id]

    def answer(self, name, **kw):
        """What came, and what should have."""
        request = self.submit(name, **kw)
        return self.tokens(request), self.expected(request)

    @staticmethod
    def expected(request):
        return expected_tokens(request)

    def info(self, name):
        return next(i for i in self.hub.instances() if i.name == name)

    def wait(self, true, timeout_s=SOON_S):
        """How long it took to become `true`."""
        start = time.monotonic()
        while not true():
            assert time.monotonic() - start < timeout_s, self.hub.instances()
            time.sleep(0.01)
        return time.monotonic() - start
