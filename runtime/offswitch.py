"""Whether a request drafts at all: off where drafting does not pay, with rare probes.

With d ms for a draft and T(w) ms for a target step of w tokens, a round that commits m tokens beats
plain decoding when m / (d + T(w)) > 1 / T(1), so it *loses* d + T(w) - m·T(1) ms when that is
positive. The switch keeps the books of these losses, from measured times: it allows itself a
share ε of plain decoding time, and every decision to draft must fit in what is left.

Exact: the decision is made before the draft, from tokens and times of past rounds only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ..graphs.errors import DraftgraphError


@dataclass
class OffSwitch:
    """The switch of one request. Call `drafts()` before a round, then one of the `observe` calls.

    share: ε, the part of plain decoding time that losing rounds may cost in total. horizon: tokens
    this request is likely to generate; the allowance ε · horizon · T(1) is there from the start.
    off_margin, on_margin: hysteresis on the advantage m·T(1) / (d + T(w)) - 1: drafting ends when
    the average is below off_margin, and a probe restarts it only from on_margin. decay: weight of
    the past in that average, per round. trial: part of the allowance that one losing stretch of
    drafting may use; the rest is for probes. patience: useless rounds in a row such a stretch may
    last, however large the allowance.

    After a stretch that lost, plain decoding lasts at least x / (ε · T(1)) rounds, x being the loss
    of one useless round; the wait doubles with every stretch in a row that does not pay. So k
    probes take (2^k - 1) waits and cost at most ε / (2^k - 1) · k of the time. On top of this, a
    probe must fit in the allowance ε · max(horizon, tokens so far) · T(1) minus all losses before
    it. The losses therefore never exceed that allowance, except that the very first round may, when
    one round already costs more.
    """

    share: float = 0.025
    horizon: int = 128
    off_margin: float = 0.0
    on_margin: float = 0.10
    decay: float = 0.75
    trial: float = 0.67
    patience: int = 4

    on: bool = field(default=True, init=False)
    loss_ms: float = field(default=0.0, init=False)  # losses in all, wins do not repay beyond 0
    _tokens: int = field(default=0, init=False)
    _plain_ms: float = field(default=0.0, init=False)  # T(1) as seen last
    _overhead_ms: float = field(default=0.0, init=False)  # x: d + T(w) - T(1)
    _won: float = field(default=0.0, init=False)  # decayed Σ m·T(1)
    _spent: float = field(default=0.0, init=False)  # decayed Σ d + T(w)
    _slump_ms: float = field(default=0.0, init=False)  # losses since the stretch was last ahead
    _stretch_ms: float = field(default=0.0, init=False)  # net loss of the stretch
    _probing: bool = field(default=False, init=False)
    _waited: int = field(default=0, init=False)
    _failures: int = field(default=0, init=False)  # stretches in a row that did not pay

    def __post_init__(self) -> None:
        if not 0 < self.share < 1 or self.horizon < 1:
            raise DraftgraphError("OffSwitch: share must be in (0, 1) and horizon at least 1")
        if self.on_margin < self.off_margin:
            raise DraftgraphError("OffSwitch: on_margin must be at least off_margin")
        if not 0 <= self.decay < 1 or not 0 < self.trial <= 1 or self.patience < 1:
            raise DraftgraphError(
                "OffSwitch: decay must be in [0, 1), trial in (0, 1], patience at least 1"
            )

    @property
    def advantage(self) -> float:
        """Decayed average of m·T(1) / (d + T(w)) - 1 over the rounds of the last stretch."""
        return self._won / self._spent - 1 if self._spent else 0.0

    @property
    def allowance_ms(self) -> float:
        return self.share * self._plain_ms * max(self.horizon, self._tokens)

    @property
    def wait(self) -> int:
        """Plain rounds before the next probe."""
        if not self._plain_ms:
            return 0
        base = max(1, math.ceil(self._overhead_ms / (self.share * self._plain_ms)))
        return base << min(max(self._failures - 1, 0), 32)

    def drafts(self) -> bool:
        """Whether the coming round drafts."""
        if self.on:
            return True
        self._probing = (
            self._waited >= self.wait and self.loss_ms + self._overhead_ms <= self.allowance_ms
        )
        return self._probing

    def observe_plain(self, plain_ms: float) -> None:
        """A plain round of T(1) = plain_ms."""
        self._check(plain_ms)
        self._plain_ms = plain_ms
        self._tokens += 1
        self._waited += 1

    def observe(self, tokens: float, round_ms: float, plain_ms: float) -> None:
        """A drafted round.

        tokens: committed, or their calibrated prediction 1 + Σ a_j, which varies less. round_ms:
        d + T(w). plain_ms: T(1). In a batch of R both are times of the whole step, with and without
        drafting; the request is then judged as if all R did as well as it does.
        """
        self._check(round_ms, plain_ms)
        if not tokens >= 0:
            raise DraftgraphError(f"OffSwitch: {tokens} tokens in a round")
        probe, self._probing = self._probing, False
        loss = round_ms - tokens * plain_ms
        self._plain_ms = plain_ms
        self._overhead_ms = max(0.0, round_ms - plain_ms)
        self._tokens += max(1, int(tokens))
        self.loss_ms = max(0.0, self.loss_ms + loss)
        if probe:  # judged on its own: what was true before the wait may no longer be
            self._won = self._spent = self._stretch_ms = self._slump_ms = 0.0
        self._won = self.decay * self._won + tokens * plain_ms
        self._spent = self.decay * self._spent + round_ms
        self._stretch_ms += loss
        self._slump_ms = max(0.0, self._slump_ms + loss)
        if probe:
            self.on = self.advantage >= self.on_margin
        elif self.advantage < self.off_margin:
            # One more useless round has to fit, or it ends here.
            allowance = self.allowance_ms
            stretch = min(self.trial * allowance, self.patience * self._overhead_ms)
            self.on = (
                self._slump_ms + self._overhead_ms <= stretch
                and self.loss_ms + self._overhead_ms <= allowance
            )
        if not self.on:
            self._waited = 0
            self._failures = self._failures + 1 if self._stretch_ms > 0 else 1

    @staticmethod
    def _check(*times: float) -> None:
        for ms in times:
            if not (math.isfinite(ms) and ms > 0):
                raise DraftgraphError(f"OffSwitch: a round of {ms} ms")
