"""The hooks on the path of the training once more, in C++: what recording costs where no GPU hides it.

``hooks.cpp`` and the headers beside it do what ``tracer.lane``, ``tracer.modules`` and ``tracer.collectives``
do, for trainings on processors. ``build`` compiles them once for each torch, where there is a compiler;
without one, or with a GPU, the hooks in Python do the work.
"""
