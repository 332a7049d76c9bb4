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
parts = -(-len(inputs) // {micro_batch})  # alike but for one sample
    for some, wanted in zip(inputs.tensor_split(parts), targets.tensor_split(parts)):
        loss = loss_fn(model(some.to(device)), wanted.to(device))
        (loss * len(some) / len(inputs)).backward()"""
_SAVED = """\
with torch.autograd.graph.save_on_cpu(pin_memory=torch.device(device).type != "cpu"):
        loss = loss_fn(model(inputs.to(device)), targets.to(device))
    loss.backward()"""


def snippet(prediction: Prediction) -> str:
    """Code that uses a method: a few lines and imports.

    It uses the names of a training loop: `model`, `loss_fn`, `optimizer`, `loader` (of
    mini-batches in host memory, of one tensor of inputs and one of targets), `device`;
    `swap_folder` for out-of-core to a file. Empty where the method is not for the device, or MBS
    refuses the step.
    """
    given, method = {"batch": prediction.batch, **prediction.settings}, prediction.method
    before, passes = "", _WHOLE
    if method.startswith("checkpointing"):
        names = given.get("blocks")
        if names is None:
            return ""  # a function of the user's own, or no block that can be recomputed
        before = _RECOMPUTE.format(names=list(names))
    if method == "accumulation":
        passes = _SPLIT.format(**given)
    elif method == "save_on_cpu":
        before, passes = "import torch\n", _SAVED
    elif "mbs" in method:
        if "micro_batch" not in given:
            return ""  # refused
        rule = ', batchnorm="deferred"' if method == "mbs_deferred" else ""
        before += _STREAMER.format(rule=rule, **given)
        passes = _STREAM
    loop = _LOOP.format(passes=passes, **given)
    if "outofcore" not in method:
        return before + loop
    if "budget_bytes" not in given:
        return ""
    folder = ", swap_folder=swap_folder" if method == "outofcore_file" else ""
    inside = "\n".join(f"    {line}" for line in loop.splitlines())
    return before + _BLOCK.format(folder=folder, **given) + inside
