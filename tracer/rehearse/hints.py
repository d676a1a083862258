"""What to do about errors whose own words do not say it. This module does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from foretrace.tracer.rehearse.ranks.exported import missing

STUB: Final = "--stub, docs/rehearse.md section 6"
"""What names the way by which a script can be helped."""

OWN_CLASS: Final = (
    "a parameter of a class of its own is a plain one in a rehearsal; in a stub file "
    f"({STUB}), keep elsewhere what it has beside its numbers"
)
"""What to say where a script asks a tensor for what those of its own class have."""

NO_FLEX: Final = (
    f"FlexAttention has no kernel without a GPU; in a stub file ({STUB}), put "
    "scaled_dot_product_attention, with is_causal or without, in place of flex_attention"
)
"""What to say where a script asks for it, by whatever function."""

SPARSE: Final = (
    "sparse tensors cannot be rehearsed; run with dense gradients, as with sparse=False, and in a stub file "
    f"({STUB}) leave out what else makes a tensor sparse, as an evaluation"
)
"""What to say of sparse tensors, of gradients or else."""

UNCOMPUTED: Final = (
    "numbers are needed here that a rehearsal does not compute: say in a stub file what they are, or leave "
    f"out what depends on them ({STUB})"
)
"""What to say where NumPy, or torch, cannot take what stands for unknown numbers."""

OLD_TYPES: Final = (
    "types of tensors that name a GPU, as torch.cuda.FloatTensor, cannot be rehearsed; name a dtype and "
    f'device="cuda" in their place, in the script or in a stub file ({STUB})'
)
"""What to say where a script makes or converts tensors by them."""

HINTS: Final[Mapping[str, str]] = {
    "FlexAttention": NO_FLEX,
    "HigherOrderOperator flex_attention": NO_FLEX,
    "FlashAttention2 has been toggled on": "FlashAttention 2 is built on GPUs only; let the model ask for "
    'attn_implementation="sdpa", which is the same kernel, by an argument of the script or by the stub '
    f"examples/rehearse/stub_flash_attention_2.py ({STUB})",
    "No CUDA GPUs are available": "it requests a GPU, but --without-gpu says that there is none",
    "Cannot access accelerator device": "a bare number names no device without a GPU; say cuda and the "
    'number, as torch.device("cuda", 0) or device_map={"": "cuda:0"}',
    "SymmetricMemory": "symmetric memory cannot be rehearsed; run with collectives in its place, by an "
    f"argument of the script or in a stub file ({STUB})",
    "Creating a new Tensor subclass": "a parameter of a class of its own, as bitsandbytes has in 4 or 8 "
    "bits, cannot be rehearsed; run with weights in 16 bits",
    "'scontrol'": "scontrol is of SLURM, which is not here: MASTER_ADDR is set, so let the script ask for "
    f"the first node only where it is not, or put what it says into a stub file ({STUB})",
    "'nvidia-smi'": "nvidia-smi is not here: leave out what asks it, by an argument of the script or in a "
    f"stub file ({STUB})",
    "type torch.cuda.": OLD_TYPES,
    **dict.fromkeys(("numpy.object_", "not supported for the input types", "type Unknown"), UNCOMPUTED),
    **dict.fromkeys(("SparseTensorImpl", "SparseCsrTensorImpl"), SPARSE),
}
"""What to say of errors of torch by what stands in them."""


FOREIGN: Final = (
    "KeyError of a parameter, which torch raises as well: an optimizer holds one that the model no longer "
    "has, as FSDP1 puts its own in place; make the optimizer after wrapping, or pass use_orig_params=True"
)
"""What to say where a parameter is looked for among others, as for the state of an optimizer."""


def hint(error: BaseException, words: str, spec: Mapping[str, Any]) -> str:
    """Return what to say of *error* instead of its *words*, empty if they say it; *spec* as ``explain``."""
    if isinstance(error, KeyError) and words.startswith("Parameter("):
        return FOREIGN
    if isinstance(error, KeyError) and (what := missing(str(error.args[0]) if error.args else "", spec)):
        return f"KeyError of {words}, {what}"
    return next((hint for sign, hint in HINTS.items() if sign in words), "")
