"""A small engine that really runs: a transformer, a scheduler, and the prefix cache between them.

It serves seeded chats, several turns each, three ways: with no cache, with a cache on one rank, and
with a cache whose pages are spread over N ranks. What is generated is the same, token for token;
what is computed is not. One command, under a minute on two CPU cores:

    make engine
    make engine ENGINE_ARGS="--variant mla --ranks 2 --rotation chain --seed 1"
    python -m examples.tiny_engine --device cuda              # N pools on one GPU, a thread a rank
    python -m examples.tiny_engine --device cuda --ranks 2    # with two GPUs: one each, over NCCL

Read it in this order:

    workload.py    chats: prompts that share starts
    model.py       GQA and MLA attention; knows no slots, asks a ``BatchKv``
    kv.py          how attention reads pools: slots are rows, or rows of the scratch
    scheduler.py   match, chunk, ``alloc_for_extend``, cache, preempt; batches overlap
    engine.py      one rank's step: compute batch t, plan batch t + 1, cache batch t
    ranks.py       the same engine on one rank, in threads, or in processes over Gloo or NCCL
    compare.py     tokens must be equal, logits are measured
    run.py         the command line and the table

What it shows, and what it leaves out:

- Every rank computes every token. The library shards where KV is kept, not the arithmetic, which a
  real engine splits by tokens or heads on top.
- Every rank runs the whole scheduler, and no rank tells another what it decided: equal calls give
  equal state. The states after every step are compared.
- Prefill is sharded and chunked; chunks end on whole pages, except a prompt's last. Decode runs on
  a rank-local pool that the last chunk's attention copies the prompt to, since gathering a whole
  prefix for one token is the wrong trade. So the next turn prefills the answer too.
- A tail that leaves a cached prefix takes a fresh rotation base (seam), so that short tails under
  one hot prompt spread over all ranks; ``--rotation chain`` keeps one base along every path.
- The pools are small on purpose. With the same pages on each rank, N ranks keep N times as many
  distinct tokens, so more is saved and less is evicted.
- After each step every invariant is checked, and at the end that no page, row or lock is left.
"""
