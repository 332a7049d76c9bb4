"""The parameter server's core: pull, push, merge, and who has to wait for whom.

Source: Lu, Liu, Hong, Wu, "Hybrid Dual-Batch and Cyclic Progressive Learning", sections 2.3, 2.4
and 3.4; the merge rules, which the papers leave open, are those of the authors' code for the
journal's version and the conference's.

The core holds no clock, no thread and no network: an engine decides when a worker calls it.
"""

import copy
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from repro.dualbatch.checks import NonFiniteError, choice, is_number, not_finite, plain, whole
from repro.measure.checks import is_whole

State = Mapping[str, Tensor]
Round = dict[int, tuple[dict[str, Tensor], "Commit"]]  # by worker, held back by BSP's barrier
SYNCS = ("bsp", "asp", "ssp")
MERGES = ("average", "journal", "conference", "delta")


class ServerError(RuntimeError):
    """A worker asked the server for something out of turn."""


@dataclass(frozen=True)
class Pull:
    """The global state that a worker receives for its next share.

    Attributes:
        worker: Number of the worker.
        iteration: The share that it is to train, from 0.
        version: Commits merged into `state` so far.
        state: Copies of the server's tensors.
    """

    worker: int
    iteration: int
    version: int
    state: dict[str, Tensor]


@dataclass(frozen=True)
class Commit:
    """One entry of the commit log.

    Attributes:
        number: Position in the log, from 0.
        worker: Who pushed.
        iteration: Which share of that worker's, from 0.
        pulled: Version that the worker started from.
        staleness: Commits of others merged between its pull and its own merge.
        factor: Model-update factor.
        time_s: When, by the engine's clock.
        loss: Mean training loss of the share.
    """

    number: int
    worker: int
    iteration: int
    pulled: int
    staleness: int
    factor: float
    time_s: float
    loss: float


class ParameterServer:
    """Global weights, merged from the weights that workers push after each share of data.

    Merge rules, with w the server's weights, w_i the worker's, p_i its pulled ones, f its factor:

    - ``average``: w ← Σ f_i w_i / Σ f_i over all workers of a round, at the barrier of BSP. With
      equal factors and one step of SGD a round, this is data-parallel training.
    - ``journal``: w ← (w + f w_i) / (1 + f), at each commit (the authors' later code).
    - ``conference``: w ← ((2 - f) w + f w_i) / 2, at each commit (their earlier code).
    - ``delta``: w ← w + f (w_i - p_i), at each commit: nothing of a stale worker's start remains,
      but n workers make n steps.

    Buffers such as BatchNorm's statistics are merged like weights. Tensors of whole numbers, such
    as its counters, grow by the sum that each worker added; those of booleans are the last
    worker's. States with NaN or an infinity, pushed or merged, are refused.

    Synchronisation (section 2.4): a worker may start its share t only while the slowest worker has
    committed at least t - s shares: s is 0 for ``bsp``, `staleness` for ``ssp``, infinite for
    ``asp``. (The paper suspends a worker where the gap reaches s; that it may start where the gap
    is s makes s = 0 BSP, as the paper has it.) BSP merges at the barrier, the others at each
    commit. SSP with s = 0 and BSP thus have the same order of commits, as have SSP with s infinite
    and ASP.

    A commit is identified by worker and iteration: pushed again, it changes nothing. Each worker's
    optimizer state after its last commit is kept in `optimizers`, beside the weights and unmerged,
    so that another worker can take its place.

    Example:
        >>> server = ParameterServer(model.state_dict(), workers=2)  # doctest: +SKIP
        >>> if server.may_start(worker):  # doctest: +SKIP
        ...     pull = server.pull(worker)
        ...     server.push(worker, pull.iteration, trained_from(pull.state), factor=0.8)

    Args:
        state: Initial weights and buffers, finite; copied.
        workers: How many.
        sync: ``bsp``, ``asp`` or ``ssp``.
        staleness: s of SSP, a whole number of shares, at least 0; `math.inf` is ASP.
        merge: None is ``average`` for BSP and ``journal`` for the others.

    Raises:
        ValueError: An argument is out of range, ``average`` without BSP, or a state that cannot be
            merged: not finite, complex, or no tensors.
    """

    def __init__(
        self,
        state: State,
        workers: int,
        sync: str = "asp",
        staleness: float | None = None,
        merge: str | None = None,
    ) -> None:
        _check(workers, sync, staleness, merge)
        _check_initial(state)
        ends = {"bsp": 0.0, "asp": math.inf}
        self.sync, self.staleness = sync, ends[sync] if staleness is None else plain(staleness)
        self.merge = merge or ("average" if sync == "bsp" else "journal")
        self.state = {name: tensor.detach().clone() for name, tensor in state.items()}
        self.version = 0
        self.iterations = [0] * int(workers)  # shares that each worker has committed
        self.log: list[Commit] = []
        self.pulls: dict[int, Pull] = {}  # by worker, the share in work
        self.optimizers: dict[int, dict[int, dict[str, Any]]] = {}  # by worker
        self._round: Round = {}

    @property
    def workers(self) -> int:
        """The number of workers."""
        return len(self.iterations)

    def may_start(self, worker: int) -> bool:
        """Whether a worker may start its next share now.

        Raises:
            ValueError: There is no such worker.
        """
        self._check_worker(worker)
        return self.iterations[worker] - min(self.iterations) <= self.staleness

    def pull(self, worker: int) -> Pull:
        """Give a worker the global state for its next share; asked again, for the same share.

        Raises:
            ServerError: The worker has to wait for slower ones.
            ValueError: There is no such worker.
        """
        worker = self._check_worker(worker)
        if not self.may_start(worker):
            raise ServerError(
                f"worker {worker} is to wait: it has committed {self.iterations[worker]} shares, "
                f"the slowest {min(self.iterations)}, and the bound is {self.staleness:g}; ask "
                "may_start first"
            )
        state = {name: tensor.clone() for name, tensor in self.state.items()}
        pull = Pull(worker, self.iterations[worker], self.version, state)
        self.pulls[worker] = pull
        return pull

    def push(
        self,
        worker: int,
        iteration: int,
        state: State,
        factor: float = 1.0,
        *,
        version: int | None = None,
        time_s: float = 0.0,
        loss: float | None = None,
        optimizer: dict[int, dict[str, Any]] | None = None,
    ) -> Commit | None:
        """Merge a worker's trained state.

        Args:
            worker: Number of the worker.
            iteration: That of its `Pull`.
            state: Weights and buffers after the share; only read.
            factor: Model-update factor, above 0.
            version: That of its `Pull`, where the worker may have been replaced.
            time_s: For the log, as is `loss`.
            loss: None is NaN in the log.
            optimizer: State of the worker's optimizer after the share; None for none.

        Returns:
            The log's entry; None where nothing was merged, because the share had been committed
            before, has been pulled anew since, or was pulled from a server that died.

        Raises:
            NonFiniteError: The loss or the state is infinite or NaN, or the merged state would be.
                The server is as it was before.
            ValueError: The state has other names, shapes or types, or an argument is out of range.
        """
        worker, iteration = self._check_worker(worker), whole("iteration", iteration, 0)
        if version is not None:
            whole("version", version, 0)
        if not is_number(time_s):
            raise ValueError(f"time_s is {time_s!r}; give a finite number of seconds")
        pull = self.pulls.get(worker)
        if pull is None or pull.iteration != iteration or version not in (None, pull.version):
            return None
        self._check_state(state, factor)
        logged = math.nan if loss is None else float(loss)
        number, stale = len(self.log), self.version - pull.version
        when = float(factor), float(time_s)
        commit = Commit(number, worker, iteration, pull.version, stale, *when, logged)
        if loss is not None and not math.isfinite(logged):
            raise _diverged(f"the loss is {logged}", commit)
        if self.sync == "bsp":
            self._hold(state, commit)
        else:
            merged = self._merged(self.state, state, pull.state, commit.factor)
            self._take(merged, state, commit, 1)
        del self.pulls[worker]
        if optimizer is not None:
            self.optimizers[worker] = optimizer
        self.log.append(commit)
        self.iterations[worker] += 1
        return commit

    def _hold(self, state: State, commit: Commit) -> None:
        """Keep a state until the round of BSP is complete, then merge all of them."""
        if (name := not_finite(state)) is not None:
            raise _diverged(f"{name!r} is not finite", commit)
        kept = {n: state[n].to(tensor.device, copy=True) for n, tensor in self.state.items()}
        waiting = self._round | {commit.worker: (kept, commit)}
        if len(waiting) == self.workers:
            self._take(self._merged_round(waiting), state, commit, self.workers)
            waiting = {}
        self._round = waiting

    def _take(self, merged: dict[str, Tensor], pushed: State, commit: Commit, more: int) -> None:
        """Make a merged state the server's if it is finite, and count the commits in it."""
        # A merge with NaN or an infinity has one, so that one look is enough.
        if (name := not_finite(merged)) is not None:
            bad = not_finite(pushed)
            what = f"merging makes {name!r} overflow" if bad is None else f"{bad!r} is not finite"
            raise _diverged(what, commit)
        self.state = merged
        self.version += more

    def _merged_round(self, waiting: Round) -> dict[str, Tensor]:
        """Merge a round of BSP, in which every worker started from the state as it is now."""
        merged = self.state
        if self.merge != "average":
            for state, commit in sorted(waiting.values(), key=lambda entry: entry[1].number):
                merged = self._merged(merged, state, self.state, commit.factor)
            return merged
        total = sum(commit.factor for _, commit in waiting.values())
        merged = {}
        for name, start in self.state.items():
            average = torch.zeros_like(start) if start.is_floating_point() else start
            for worker in sorted(waiting):  # in a fixed order, for sums depend on it
                state, commit = waiting[worker]
                if average.is_floating_point():  # w ← Σ f_i w_i / Σ f_i
                    average.add_(state[name], alpha=commit.factor / total)
                else:
                    average = _merged_whole(average, state[name], start)
            merged[name] = average
        return merged

    def _merged(self, state: State, pushed: State, pulled: State, f: float) -> dict[str, Tensor]:
        """Merge one commit: w is the server's tensor, w_i the pushed one, p_i the pulled one."""
        merged = {}
        for name, w in state.items():
            w_i, p_i = pushed[name].to(w.device), pulled[name]
            if not w.is_floating_point():
                merged[name] = _merged_whole(w, w_i, p_i)
            elif self.merge == "delta":
                merged[name] = w.add(w_i - p_i, alpha=f)  # w ← w + f (w_i - p_i)
            elif self.merge == "journal":
                merged[name] = w.lerp(w_i, f / (1 + f))  # w ← (w + f w_i) / (1 + f)
            else:
                merged[name] = w.lerp(w_i, f / 2)  # conference: w ← ((2 - f) w + f w_i) / 2
        return merged

    def state_dict(self, with_pulls: bool = True) -> dict[str, Any]:
        """Everything that a server resumes from: plain values and tensors.

        Args:
            with_pulls: Keep the n pulled states, without which workers have to pull again.
        """
        pulls = [asdict(pull) for pull in self.pulls.values()] if with_pulls else []
        waiting = [{"state": s, "commit": asdict(commit)} for s, commit in self._round.values()]
        return {
            "state": {name: tensor.clone() for name, tensor in self.state.items()},
            "version": self.version,
            "iterations": list(self.iterations),
            "log": [asdict(commit) for commit in self.log],
            "pulls": pulls,
            "round": waiting,
            "optimizers": copy.deepcopy(self.optimizers),
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Resume from `state_dict`.

        Raises:
            ValueError: It is of another number of workers, of another model, or not finite.
        """
        if len(saved["iterations"]) != self.workers:
            raise ValueError(
                f"the checkpoint is of {len(saved['iterations'])} workers, this server has "
                f"{self.workers}; give the same plan, or start anew without it"
            )
        if saved["round"] and self.sync != "bsp":
            raise ValueError(
                f"the checkpoint is of a round of 'bsp', this server's sync is {self.sync!r}; give "
                "the same, or start anew without it"
            )
        self._check_state(saved["state"], 1.0)
        for state in states_of(saved):
            if (name := not_finite(state)) is not None:
                raise ValueError(
                    f"the checkpoint's {name!r} is not finite: its training had diverged; start "
                    "anew without it, with a lower learning rate"
                )
        for name, tensor in self.state.items():
            tensor.copy_(saved["state"][name])
        self.version, self.iterations = saved["version"], list(saved["iterations"])
        self.log = [Commit(**entry) for entry in saved["log"]]
        self.pulls = {entry["worker"]: Pull(**entry) for entry in saved["pulls"]}
        self.optimizers = copy.deepcopy(saved["optimizers"])
        held = [(dict(entry["state"]), Commit(**entry["commit"])) for entry in saved["round"]]
        self._round = {commit.worker: (state, commit) for state, commit in held}

    def _check_worker(self, worker: int) -> int:
        if not is_whole(worker, 0, self.workers - 1):
            raise ValueError(f"worker is {worker!r}; there are 0 to {self.workers - 1}")
        return int(worker)

    def _check_state(self, state: State, factor: float) -> None:
        if not is_number(factor) or factor <= 0:
            raise ValueError(f"factor is {factor!r}; give a finite number above 0")
        ours, theirs = ({n: t.shape for n, t in one.items()} for one in (self.state, state))
        names = ours.keys() | theirs.keys()
        wrong, how = sorted(n for n in names if ours.get(n) != theirs.get(n)), "names or shapes"
        if not wrong:
            types = {name: (state[name].dtype, t.dtype) for name, t in self.state.items()}
            wrong = [f"{name} ({a}, not {b})" for name, (a, b) in types.items() if a != b]
            how = "types"
        if wrong:
            raise ValueError(
                f"the state differs in {how} from the server's: {', '.join(wrong[:5])}; push what "
                "model.state_dict() gives for the model that was pulled"
            )


def states_of(saved: Mapping[str, Any]) -> list[State]:
    """All states of a server's `state_dict`: its own, pulled ones, a round's."""
    return [saved["state"], *(entry["state"] for entry in [*saved["pulls"], *saved["round"]])]


def _diverged(what: str, commit: Commit) -> NonFiniteError:
    return NonFiniteError(what, commit.worker, commit.iteration + 1, None)


def _merged_whole(current: Tensor, new: Tensor, pulled: Tensor) -> Tensor:
    return new.clone() if current.dtype == torch.bool else current + (new - pulled)


def _check_initial(state: State) -> None:
    for name, tensor in state.items():
        if not isinstance(tensor, Tensor) or tensor.dtype.is_complex:
            kind = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            way = "by register_buffer(..., persistent=False)"
            if name.endswith("_extra_state"):
                way = "without get_extra_state"
            raise ValueError(
                f"the state's {name!r} is of type {kind}, which cannot be merged; keep it out of "
                f"the model's state, such as {way}"
            )
    if (wrong := not_finite(state)) is not None:
        raise ValueError(
            f"the initial state's {wrong!r} is not finite, and cannot be merged; mend how the "
            "model is made, or keep a constant such as a mask out of the state by "
            "register_buffer(..., persistent=False)"
        )


def _check(workers: int, sync: str, staleness: float | None, merge: str | None) -> None:
    if not is_whole(workers, 1):
        raise ValueError(f"workers is {workers!r}; give at least 1, a whole number")
    choice("sync", sync, SYNCS)
    bound = is_whole(staleness, 0)
    if isinstance(staleness, float):
        bound = staleness == math.inf or (staleness >= 0 and staleness.is_integer())
    if (sync == "ssp") != bound or (sync != "ssp" and staleness is not None):
        raise ValueError(
            f"staleness is {staleness!r} with sync={sync!r}; give 0 or more with 'ssp', a whole "
            "number or math.inf, and None else"
        )
    if merge is not None:
        choice("merge", merge, MERGES)
    if merge == "average" and sync != "bsp":
        raise ValueError(
            f"merge='average' is of a whole round and needs sync='bsp', not {sync!r}; choose "
            "'journal', 'conference' or 'delta'"
        )
