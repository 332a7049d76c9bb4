"""The lines that use each method in a training loop of one's own."""

from repro.advise.predicting import Prediction

_LOOP = """\
for inputs, targets in loader:  # {batch} samples each
    optimizer.zero_grad()
    {passes}
    optimizer.step()"""
_WHOLE = "loss_fn(model(inputs.to(device)), targets.to(device)).backward()"
_STREAM = "streamer.backward(inputs, targets)"
_STREAMER = """\
from repro.mbs import MicroBatchStreamer
streamer = MicroBatchStreamer(model, loss_fn, {micro_batch}, device=device{rule})
"""
_BLOCK = """\
from repro.outofcore import OutOfCore
with OutOfCore({budget_bytes}, device=device, model=model, optimizer=optimizer{folder}):
"""
_RECOMPUTE = """\
from repro.advise import checkpoint_blocks
checkpoint_blocks(model, {names})
"""
_SPLIT = """\
for some, wanted in zip(inputs.split({micro_batch}), targets.split({micro_batch})):
        loss = loss_fn(model(some.to(device)), wanted.to(device))
        (loss * len(some) / len(inputs)).backward()"""
_SAVED = """\
with torch.autograd.graph.save_on_cpu(pin_memory=torch.device(device).type != "cpu"):
        loss = loss_fn(model(inputs.to(device)), targets.to(device))
    loss.backward()"""
_THETA = """\
from repro.adaptive import ThetaController, full_cost, set_lr
controller = ThetaController({initial_batch}, {batch}, initial_lr={lr})
step = controller.observe(full_cost(model, loader, {initial_batch}), model.parameters())
while step.epoch <= epochs:
    loader.set_batch_size(step.batch_size)
    set_lr(optimizer, step.lr)
    step = controller.observe(train_one_epoch(), model.parameters())"""
_DUAL = """\
from repro.dualbatch import CyclicProgressiveSchedule, DualBatchPlan, Stage, train_dual_batch
from repro.measure import TimeModel
times = TimeModel(a={a:.6g}, b={b:.6g})
plan = DualBatchPlan.solve(times, {k}, 1, 1, large_batch={large_batch}, samples=len(images))
schedule = CyclicProgressiveSchedule([Stage(epochs, {lr})])
result = train_dual_batch(make_model, (images, labels), plan, schedule, device=device)
model.load_state_dict(result.state)"""
_TUNED = """\
from repro.microconv import tune
print(tune(model, next(iter(loader))[0].to(device), workspace_limit=64 * 2**20, strict=False))
"""
LR = 0.01


def snippet(prediction: Prediction) -> str:
    """Code that uses a method: a few lines and imports.

    It uses the names of a training loop: `model`, `loss_fn`, `optimizer`, `loader` (of
    mini-batches in host memory), `device`; `swap_folder` for out-of-core to a file; for θ-adaptive
    training a loader with `set_batch_size`, `train_one_epoch` and `epochs`; for dual-batch learning
    `make_model`, `images`, `labels` and `epochs`. Empty where the method is not for the device, MBS
    refuses the step, or nothing could be solved.
    """
    given = {"batch": prediction.batch, "lr": LR, **prediction.settings}
    method = prediction.method
    if method == "theta":
        return _THETA.format(**given)
    if method == "dualbatch":
        return _DUAL.format(**given) if "a" in given else ""
    before = ""
    if method.startswith("checkpointing"):
        names = given.get("blocks", ())
        if not names or not isinstance(names, tuple):
            return ""  # a function of the user's own
        before = _RECOMPUTE.format(names=list(names))
    if method == "microconv":
        before = _TUNED
    passes = _WHOLE
    if method == "accumulation":
        passes = _SPLIT.format(**given)
    elif method == "save_on_cpu":
        passes = _SAVED
    elif "mbs" in method:
        if "micro_batch" not in given:
            return ""  # refused
        rule = ', batchnorm="deferred"' if method == "mbs_deferred" else ""
        before += _STREAMER.format(rule=rule, **given)
        passes = _STREAM
    loop = _LOOP.format(passes=passes, **given)
    if "outofcore" in method and "budget_bytes" in given:
        folder = ", swap_folder=swap_folder" if method == "outofcore_file" else ""
        inside = "\n".join(f"    {line}" for line in loop.splitlines())
        return before + _BLOCK.format(folder=folder, **given) + inside
    if method == "outofcore_file":
        return ""
    return before + loop
