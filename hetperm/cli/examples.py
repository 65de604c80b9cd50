"""Examples at the end of every command's help."""

# Name of a command -> (command line, what it is for)
EXAMPLES: dict[str, tuple[tuple[str, str], ...]] = {
    "train": (
        ("hetperm train", "20 clients of five sizes on digits, in about a minute"),
        ("hetperm train --seeds 0 1 2", "the same with three seeds: means, spread, paired differences"),
        ("hetperm train --baselines local,fedavg-ft,fjord-ft", "other rivals"),
        ("hetperm train --dataset npz:phones.npz --partition natural", "your own data, a client for each user"),
        ("hetperm train --out runs/mine --resume", "continue after a crash"),
    ),
    "reproduce": (
        ("hetperm reproduce hetero --quick", "a small version, to see that everything works"),
        ("hetperm reproduce hetero --settings digits --seeds 0 1", "one setting with two seeds"),
    ),
    "export": (
        ("hetperm export runs/digits-perm --client 7", "one client's model, for torch"),
        ("hetperm export runs/digits-perm --all --format onnx", "every client's model, for browsers and servers"),
    ),
    "report": (("hetperm report runs/digits-perm", "write runs/digits-perm/report.html again"),),
    "compare": (
        ("hetperm compare runs/digits-perm runs/digits-perm-2", "two runs, in the terminal and as a page"),
        ("hetperm compare runs/a runs/b runs/c --out abc.html", "three runs, and the name of the page"),
    ),
    "join": (
        ("hetperm join runs/digits-perm --data phone.npz --tier entry", "with the width of a tier"),
        ("hetperm join runs/digits-perm --data pc.npz --width 1 --steps 50", "a wide client, with steps of its own"),
    ),
    "who": (("hetperm who runs/digits-perm --client 7", "the partners of client 7"),),
    "federate": (
        ("hetperm federate", "four nodes on this machine"),
        ("hetperm federate --nodes 6 --algorithm fedavg-ft", "six nodes, another method"),
    ),
    "deploy": (
        ("hetperm deploy --folder fed --nodes 3 --address 10.0.0.1:8000", "three nodes that reach the server there"),
    ),
    "serve": (
        ("hetperm serve --folder fed --out runs/fed", "wait for the nodes, then run the job"),
        ("hetperm serve --folder fed --out runs/fed --resume", "continue after the server was stopped"),
    ),
    "node": (("hetperm node --folder nodes/0 --data npz:mine.npz --device-mb 24", "as large a model as fits 24 MiB"),),
    "bench": (("hetperm bench --quick", "a small version of everything; its figures mean little"),),
    "bench resources": (
        ("hetperm bench resources", "ResNet-18 on the mobile profile, in some minutes"),
        ("hetperm bench resources --model cnn --no-federated --no-curves", "memory and verdicts only"),
    ),
}


def text(command: str) -> str:
    """The examples of a command as help shows them; empty if it has none."""
    pairs = EXAMPLES.get(command, ())
    lines = [f"  {line}\n      {about}" for line, about in pairs]
    return "\n".join(["examples:", *lines]) if lines else ""
