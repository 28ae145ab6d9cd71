"""One step as a CUDA graph: launched as a whole, as serving engines launch their decode steps."""

from __future__ import annotations

from serving_sim.calibration.timing import Run


def capture(run: Run, warm_ups: int = 3) -> Run:
    """Return the replay of ``run``, captured once; raises RuntimeError where it cannot be.

    The inputs and outputs of ``run`` must stay at their addresses. Warm-up and capture share one
    side stream, so that libraries have made their handles and workspaces there before.
    """
    import torch

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warm_ups):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        output = run()

    def replay() -> object:
        graph.replay()
        return output  # held: the graph writes into it

    return replay
