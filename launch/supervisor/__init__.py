"""Supervises a run from outside: starts launchers on one or more nodes, forwards signals, and restarts after failures.

torchrun's agent (torchelastic) restarts ranks, too, but does not suffice (torch 2.13; see ARCHITECTURE.md). Every exit code other than 0 is
a failure to it: 75, a requested stop after a checkpoint, is restarted, or ends as 1. By default it does not forward
SIGUSR1, which ends the agent alone, and kills ranks that take longer than 30 s to stop. Ranks run in sessions of their
own and outlive an agent that is killed with SIGKILL. With the default static rendezvous the number of nodes is fixed;
with c10d, a node that joins restarts all ranks at once, not after the next failure. It starts no agents on other nodes,
has no preflight, and restarts without delay and with the same arguments, so that `run.resume=never` would fail. The
`deepspeed` launcher has no restarts: when a rank fails, it ends the others.
"""
