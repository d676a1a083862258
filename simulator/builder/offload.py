"""What travels between a GPU and its host: states and activations that do not stay on the device.

Copies have a stream of their own, ``copy``, so that they run beside compute. References: DeepSpeed
``runtime/zero/stage_1_and_2.py`` and ``stage3.py`` with ``cpu_offload``; ``torch.distributed.fsdp``
``CPUOffloadPolicy``; ``torch.autograd.graph.save_on_cpu``; for some layers only Transformer Engine's
``AsyncDoubleBufferGroupOffloadHandler`` (transformer_engine/pytorch/cpu_offload.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from foretrace.simulator.builder.program_builder import COPY, HOST, Task, Template
from foretrace.simulator.builder.stages import Unit
from foretrace.simulator.job import Job
from foretrace.simulator.memory.activations import kept_bytes
from foretrace.simulator.program import Label, to_ns
from foretrace.simulator.workload.ops import DTYPE_BYTES

HOST_ADAM_PARAMS_PER_S: Final = 1.4e9
"""Parameters that the processors of a node update per second.

DeepSpeed's CPU-Adam: 11.6 billion in 8.2 s (deepspeedai/DeepSpeed pull request 735); 72 billion on four nodes
in about 10 s, 1.8 billion per second and node with the copies (its issue 6834). A ten-core Xeon took
22 s for 1.35 billion (issue 1635).
"""

NVME_BYTES_PER_S: Final = 25e9
"""What the drives of a node read or write per second, all of its GPUs together: 1.6 GB/s for each of 16.

Rajbhandari et al. 2021, arXiv:2104.07857 (ZeRO-Infinity), figure 2b, cited from memory and not verified
against its text; drives of today may be several times as fast.
"""

STATE_BYTES: Final = 24
"""Per parameter and step, what Adam reads and writes of its fp32 weight and two moments."""

IN_TRANSIT: Final = 2
"""Units whose activations are on the device at once: the one in use and the one on its way."""

STATES: Final = ("states", "all")
ACTIVATIONS: Final = ("activations", "all")

Tasks = tuple[int, ...]


class Offload:
    """Writes copies to and from the host, and the optimizer that runs there, into templates.

    *job*: says what is offloaded, and on which machine.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._sharing = min(job.most_ranks_per_node, job.layout.world_size)
        self._host_bytes_per_s = self._bytes_per_s = job.cluster.device.host_bytes_per_s
        if job.offload_to == "nvme":
            # The drives belong to the node: its ranks have a share each.
            self._bytes_per_s = min(self._bytes_per_s, NVME_BYTES_PER_S / self._sharing)
        self.has_optimizer = job.offload in ("optimizer", *STATES)
        self.has_states = job.offload in STATES
        self.has_activations = job.offload in ACTIVATIONS

    def copy(
        self, template: Template, name: str, size_bytes: int, after: Sequence[int], *, layer: int = -1
    ) -> Tasks:
        """Append a copy of *size_bytes* that waits for *after*; return it, or *after* if there is nothing."""
        if not size_bytes:
            return tuple(after)
        busy_ns = to_ns(size_bytes / self._bytes_per_s)
        label = Label("copy", "offload", name)
        return (template.add(Task(COPY, label, busy_ns, layer=layer, bytes_moved=size_bytes), after),)

    def activations_bytes(self, unit: Unit) -> int:
        """Return what a micro-batch keeps of *unit* and sends away, 0 for embedding and head."""
        return kept_bytes(self._job, unit.layer) if self._travels(unit) else 0

    def room(self, order: Sequence[Unit], at: int, stored: Sequence[Tasks]) -> Tasks:
        """Return the copy away that has to be over before unit *at* of a forward runs.

        If some layers travel, each has its share of the layers to do so, so that copies are spread evenly.
        """
        if not self._job.offload_layers:
            # The first units find room; each later one needs that the one before the last has left.
            return stored[at - IN_TRANSIT] if at >= IN_TRANSIT else ()
        layer = order[at].layer
        leaving = range(min(layer, self._job.offload_layers))
        return next((stored[at - layer + one] for one in leaving if self._window(one) == layer - 1), ())

    def _travels(self, unit: Unit) -> bool:
        n_layers = self._job.offload_layers or self._job.model.n_layers
        return self.has_activations and 0 <= unit.layer < n_layers

    def _window(self, layer: int) -> int:
        """Return the layer of the forward at whose end *layer* has left, at whose backward it comes back.

        With 4 of 10 layers that is 2, 5, 7 and 9: the first get the layers that are left over.
        """
        each, over = divmod(self._job.model.n_layers, self._job.offload_layers)
        return each * (layer + 1) - 1 + min(layer + 1, over)

    def _due(self, order: Sequence[Unit], at: int) -> int:
        """Return the number of units of *order* whose copies back begin when a backward comes to *at*."""
        if not self._job.offload_layers:
            return min(at + IN_TRANSIT, len(order))
        due, layer = at + 1, order[at].layer
        while layer >= 0 and due < len(order) and self._is_due(order[due], layer):
            due += 1
        return due

    def _is_due(self, unit: Unit, layer: int) -> bool:
        return not self._travels(unit) or self._window(unit.layer) >= layer

    def stored(self, template: Template, order: Sequence[Unit], at: int, stored: list[Tasks]) -> None:
        """Append the copy of what unit *at* of a forward keeps, once it has been computed, to *stored*."""
        size = self.activations_bytes(order[at])
        found = self.copy(template, "activations", size, template.tails, layer=order[at].layer)
        stored.append(found if size else ())

    def fetched(self, template: Template, order: Sequence[Unit], at: int, fetched: list[Tasks]) -> None:
        """Append the copies back of the units that a backward comes to, as far as they begin by unit *at*."""
        while len(fetched) < self._due(order, at):
            unit = order[len(fetched)]
            size = self.activations_bytes(unit)
            found = self.copy(template, "activations", size, template.tails, layer=unit.layer)
            fetched.append(found if size else ())

    def optimizer(self, template: Template, n_params: int, *, gradients_are_there: bool) -> None:
        """Append an optimizer step of *n_params* on the host to the main line.

        Gradients come down unless they have, the processors of the node update their shares side by side, and
        parameters go back up, from memory of the host, unless they live there. States on drives are read and
        written meanwhile.
        """
        width, job = DTYPE_BYTES[self._job.precision], self._job
        size = 0 if gradients_are_there else n_params * DTYPE_BYTES[job.gradient_dtype]
        label = Label("copy", "offload", "gradients")  # of no length where it only waits for earlier ones
        template.then(Task(COPY, label, to_ns(size / self._bytes_per_s), bytes_moved=size))
        # The weight and the states are read and written, the gradient is read.
        moved = 2 * (job.master_bytes or width) + 2 * job.updates.state_bytes
        gradient = DTYPE_BYTES["fp32"]
        # Over what Adam reads and writes of a parameter, for which the rate was measured.
        per_param_s = (moved + gradient) / (STATE_BYTES + gradient) / HOST_ADAM_PARAMS_PER_S
        if job.offload_to == "nvme":
            # Drives work while the processors do; the slower of the two decides.
            per_param_s = max(per_param_s, moved / NVME_BYTES_PER_S)
        # The processors of a node have the shares of all its ranks to update.
        host_ns = to_ns(n_params * self._sharing * per_param_s)
        template.then(Task(HOST, Label("host", "optimizer", "optimizer on the host"), host_ns))
        if not (self.has_states and job.shards.parameters):
            size = n_params * width
            label = Label("copy", "offload", "parameters")
            template.then(Task(COPY, label, to_ns(size / self._host_bytes_per_s), bytes_moved=size))
