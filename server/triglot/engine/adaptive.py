"""The delay and size of a batcher that is told no more than an objective: 99 % of the requests within so long.

Strategy: two things are known without trying.

- *Whom to wait for.* The rows of a batch and all others that are there at its end are those in flight; an idle
  instance waits for so many and never for more. A lone client is alone in flight, so it never waits.
- *How long it may pay.* To execute two batches as one saves the fixed cost of one execution. A straggler that came
  too late for a batch waits until that one ends, and it pays to keep it back until the others are back. So no
  request is kept for longer than one batch and one fixed cost. What a batch costs is fitted to what the
  executions took, fixed + per_row · rows.

Between this and nothing lies a small grid of settings: a share of the longest delay, and a share of the rows in
flight. Trials climb it: another setting runs in turn with the one in use (see `Trial`) and takes its place when it
is clearly better. Not to wait is the first setting, and it wins when waiting is no better. Trials have a budget, a
share of the batches, which shrinks while they change nothing and is restored when the load changes. Late requests
end a trial or the waiting at once, unless they are as late without any waiting.

Clients that ask again when they have their answer come back together if they were answered together, and until
they are back the instances rest. So a share of half the rows or less is also the most that a batch takes: while
one part of the clients is in the model, the others are answered and ask again. Where the instance rests, or there
are several to share the clients, such parts are tried first. What is in parts stays so by itself, and what is
together, too; so whenever parts are given up, in a trial as well, everybody is waited for first, or both settings
would have the parts. They are given up at once when the load changes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from math import ceil

from triglot.core.readings import Reading
from triglot.engine.trial import FEWEST_PAIRS, SETTLE_BATCHES, SLOT_BATCHES, Lateness, Setting, Trial

WAITS = (0.125, 0.25, 0.5, 1.0)
COMPANIES = (0.9, 0.75, 1.0)
AT_ONCE, TOGETHER = Setting(0.0), Setting(1.0)
FIRST_CHOICES = (TOGETHER, Setting(1.0, 0.75), Setting(0.25))
"""What is tried when nothing is waited for."""
REST, STEADY = 0.1, 0.75
"""Of an only instance's time, in which it does nothing; of the most rows in flight, as there are on average. Where
both are more, parts are tried."""
PEAK_BATCHES = 16
"""So many batches back the rows in flight are looked at."""
BUDGET, FULL_BUDGET = 0.1, 256.0
"""Batches in trials: for each other one, and at most of an instance, which is also what there is at the start."""
PATIENCE = 5
"""After so many trials in vain the budget shrinks no more."""
TRIAL_BATCHES = FEWEST_PAIRS * (SETTLE_BATCHES + SLOT_BATCHES)
GRANT_BATCHES = 10 * TRIAL_BATCHES
"""Between two changes of the load that are answered with a trial at once. As the others, of each instance."""
LONG_ALONE = 8 * PEAK_BATCHES
"""Requests that were alone in flight, one after the other: that the load has changed has been noticed by then."""
MARGIN = 0.95
"""Of the objective, what is aimed at."""
LATENCIES = 1000


class BatchCost:
    """`fixed` + `per_row` · rows, the seconds that an execution takes; old ones count less and less."""

    __slots__ = ("_batches", "_covariance", "_rows", "_seconds", "_variance", "fixed", "per_row")

    def __init__(self) -> None:
        self.fixed = self.per_row = 0.0
        self._batches = 0
        self._rows = self._seconds = self._variance = self._covariance = 0.0

    def add(self, rows: int, seconds: float) -> None:
        """An execution."""
        self._batches += 1
        weight = max(1 / self._batches, 0.02)
        more_rows, more_seconds = rows - self._rows, seconds - self._seconds
        self._rows += weight * more_rows
        self._seconds += weight * more_seconds
        self._variance = (1 - weight) * (self._variance + weight * more_rows**2)
        self._covariance = (1 - weight) * (self._covariance + weight * more_rows * more_seconds)
        if self._variance > (0.05 * self._rows) ** 2:  # Batches of one size say nothing of others.
            self.per_row = max(0.0, self._covariance / self._variance)
        self.per_row = min(self.per_row, self._seconds / self._rows)
        self.fixed = self._seconds - self.per_row * self._rows

    def of(self, rows: int) -> float:
        """What an execution with so many rows would take."""
        return self.fixed + self.per_row * rows


class DelayTuner:
    """Finds the `delay` and `size` with the highest throughput at which 99 % of the requests keep to `objective`.

    `delay` is how many seconds the oldest request is kept back for others while an instance is idle, `size` the
    rows worth waiting for: so many leave at once, and `most` is how many leave together. The batcher reads them
    when it forms a batch. There is no lock: `observe` is called by one thread at a time.
    """

    def __init__(self, objective: float, max_batch_size: int, instances: int = 1) -> None:
        self.delay = 0.0
        self.size = 1
        self.most = self._max_batch_size = max(max_batch_size, 1)
        self._objective = objective
        self._instances = instances
        # For each batch that runs, one on its way; or fewer, or more of them.
        parts = (2 * instances, instances + 1, 3 * instances, instances)
        self._parts = [1 / number for number in dict.fromkeys(parts) if number > 1]
        self._cost = BatchCost()
        self._in_flight: deque[int] = deque(maxlen=PEAK_BATCHES)
        self._peak = 1
        """The most rows in flight of late."""
        self._latencies: deque[float] = deque(maxlen=LATENCIES)
        self._executed: deque[tuple[float, int, float]] = deque(maxlen=64)
        self._setting = AT_ONCE
        self._alone = 0
        """Requests of late that were alone in flight."""
        self._in_parts = False
        self._gathers = 0
        """Batches before which everybody is still waited for."""
        self._lateness = self._no_lateness()
        self._late_anyway = False
        self._trial: Trial | None = None
        self._trials = {"adopted": 0, "rejected": 0}
        self._back_offs = 0
        self._tried: list[Setting] = []
        """In trials, since all were or the setting has changed."""
        self._budget = self._full_budget = FULL_BUDGET * instances
        self._trial_batches = TRIAL_BATCHES * instances
        self._ungranted = 0
        self._in_vain = 0
        """Trials since the last one that changed something, or since the load has changed."""
        self._load = 0.0
        self._load_before = 0.0
        self._batches = 0
        """Since the setting or the load has changed."""

    def observe(
        self, now: float, rows: int, compute_seconds: float, latencies: Sequence[float], waiting: int
    ) -> None:
        """A batch was executed until `now`, in `compute_seconds`.

        `latencies`: of each request in it, the seconds from its arrival until now. `waiting`: how many other
        requests are there at its end, in the queue or with other instances.
        """
        if not latencies or not rows:
            return
        self._latencies.extend(latencies)
        self._executed.append((now, rows, compute_seconds))
        self._alone = 0 if waiting or len(latencies) > 1 else self._alone + 1
        if self._alone == LONG_ALONE:
            self._trial, self._gathers = None, 0
            self.delay, self.size, self.most = 0.0, 1, self._max_batch_size
        if self._alone >= LONG_ALONE:
            return  # There is nobody to wait for, and nothing to find out.
        in_flight = rows + round(waiting * rows / len(latencies))
        self._in_flight.append(in_flight)
        self._peak = max(self._in_flight)
        self._cost.add(rows, compute_seconds)
        if self._trial is None:
            self._lateness.add(latencies)
            self._follow_load(in_flight)
            self._between_trials()
        else:
            self._during_trial(self._trial, now, rows, latencies)
        self._apply()

    def _no_lateness(self) -> Lateness:
        return Lateness(self._objective * MARGIN)

    def _company(self) -> int:
        """Rows that can be in a batch."""
        return min(self._peak, self._max_batch_size)

    def _longest(self) -> float:
        """The longest delay that may pay."""
        return min(self._cost.fixed + self._cost.of(self._company()), self._objective * MARGIN)

    def _apply(self) -> None:
        trial = self._trial
        setting = trial.other if trial is not None and trial.on_other else self._setting
        if self._in_parts and not setting.splits:
            self._gathers = SETTLE_BATCHES * self._instances
        self._in_parts = setting.splits
        if self._gathers:
            self._gathers -= 1
            setting = TOGETHER
        size = min(ceil(setting.company * self._peak), self._max_batch_size)
        if setting.wait and size > 1:
            self.size, self.delay = size, setting.wait * self._longest()
        else:
            self.size, self.delay = 1, 0.0
        self.most = size if setting.splits else self._max_batch_size

    def _follow_load(self, in_flight: int) -> None:
        """Look for another load: it makes everything worth another trial."""
        self._batches += 1
        self._ungranted += 1
        self._load += max(1 / self._batches, 1 / PEAK_BATCHES) * (in_flight - self._load)
        if self._batches < 2 * PEAK_BATCHES:
            return
        self._load_before = self._load_before or self._load
        # A few more or less are chance.
        if not 0.5 < (self._load + 4) / (self._load_before + 4) < 2:
            self._late_anyway = False
            if self._ungranted >= GRANT_BATCHES * self._instances:
                self._ungranted = 0
                self._budget = max(self._budget, self._trial_batches)
            if self._setting.splits:
                self._use(AT_ONCE)
            self._start_over()
            if self._setting.wait:
                self._tried = [one for one in self._choices() if one != AT_ONCE]  # Is it still of use to wait?

    def _start_over(self) -> None:
        self._in_vain = self._batches = 0
        self._load_before = 0.0
        self._tried = []

    def _between_trials(self) -> None:
        self._budget = min(self._budget + BUDGET / (1 + min(self._in_vain, PATIENCE)) ** 2, self._full_budget)
        if self._lateness.violated and not self._late_anyway:
            if self._setting.wait:
                self._back_offs += 1
                self._in_parts = False  # Nobody is waited for.
                self._budget = min(self._budget, 0.0)
                self._use(AT_ONCE)
                return
            # It is not the delay's fault: perhaps others are less late.
            self._late_anyway = True
            self._budget = max(self._budget, self._trial_batches)
        rested = self._batches >= PEAK_BATCHES and self._budget >= self._trial_batches
        if rested and self._company() > 1:
            choice = self._choice()
            self._tried.append(choice)
            self._trial = Trial(choice, self._objective * MARGIN, self._instances)

    def _choice(self) -> Setting:
        choices = self._choices()
        untried = [one for one in choices if one not in self._tried]
        if not untried:
            self._tried = []
        return (untried or choices)[0]

    def _choices(self) -> Sequence[Setting]:
        """What is tried, in turn: other shares of the rows, delays near by, and none."""
        wait, company = self._setting.wait, self._setting.company
        parts = [part for part in self._parts if part * self._peak >= 2]
        if self._instances == 1 and (self._load < STEADY * self._peak or self._rest() < REST):
            parts = []
        if not wait:
            return [*[Setting(1.0, part) for part in parts], *FIRST_CHOICES]
        companies = COMPANIES[:1] if self._setting.splits else COMPANIES  # One is like another to parts.
        choices = [Setting(wait, other) for other in (*parts, *companies) if other != company]
        at = WAITS.index(wait)
        choices += [Setting(other, company) for other in WAITS[max(at - 1, 0) : at + 2] if other != wait]
        return [*choices, AT_ONCE]

    def _rest(self) -> float:
        """The share of their time that the instances have done nothing of late."""
        executed = list(self._executed)
        seconds = (executed[-1][0] - executed[0][0]) * self._instances
        return 1 - sum([took for _, _, took in executed[1:]]) / seconds if seconds > 0 else 0.0

    def _during_trial(self, trial: Trial, now: float, rows: int, latencies: Sequence[float]) -> None:
        if trial.on_other:
            self._budget -= 1
        else:
            self._lateness.add(latencies)
        trial.add(now, rows, latencies)
        late = self._lateness.violated
        if self._company() == 1 or (late and self._setting.wait and not self._late_anyway):
            self._trial = None  # There is nobody left to wait for, or no time.
            return
        verdict = trial.verdict
        if trial.lateness.doubtful and not self._late_anyway and not late:
            verdict = -1.0
        if verdict is None:
            return
        self._trial = None
        if verdict > 0 or (verdict == 0 and trial.other == AT_ONCE):
            self._trials["adopted"] += 1
            self._use(trial.other)
            self._lateness = trial.lateness
        else:
            self._trials["rejected"] += 1
            self._in_vain += 1

    def _use(self, setting: Setting) -> None:
        self._setting = setting
        self._lateness = self._no_lateness()
        self._start_over()

    def readings(self) -> Iterator[Reading]:
        """What it chose, and what it measured."""
        latencies, executed = sorted(self._latencies), list(self._executed)
        p99 = latencies[int(len(latencies) * 0.99)] if latencies else 0.0
        seconds = executed[-1][0] - executed[0][0] if executed else 0.0
        rate = sum(rows for _, rows, _ in executed[1:]) / seconds if seconds > 0 else 0.0
        yield Reading("adaptive_delay_seconds", "How long an idle instance waits for more requests.", self.delay)
        yield Reading("adaptive_size_rows", "Rows that leave at once.", self.size)
        yield Reading("adaptive_most_rows", "The most rows that leave together.", self.most)
        yield Reading("adaptive_objective_seconds", "What 99 % of the requests are to keep to.", self._objective)
        yield Reading("adaptive_p99_seconds", f"99 % of the last {LATENCIES} requests took no longer.", p99)
        yield Reading("adaptive_rows_per_second", "Rows executed, over the last batches.", rate)
        cost = "What an execution seems to cost, without rows and for each row."
        yield Reading("adaptive_cost_seconds", cost, self._cost.fixed, {"part": "fixed"})
        yield Reading("adaptive_cost_seconds", cost, self._cost.per_row, {"part": "row"})
        for outcome, number in self._trials.items():
            yield Reading(
                "adaptive_trials", "Settings that were tried.", number, {"outcome": outcome}, counter=True
            )
        yield Reading(
            "adaptive_back_offs", "Ends of waiting because of late requests.", self._back_offs, counter=True
        )
