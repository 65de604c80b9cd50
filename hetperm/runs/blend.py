"""The first model of a client that joins: a mean of its partners' models, chosen by its loss on data they never saw."""

from collections.abc import Callable, Mapping, Sequence

from hetperm.params import Params
from hetperm.server.slicer import Slicer
from hetperm.server.visits import mixed_over

MOST = 16  # models that a newcomer tries: those of the partners with the largest weights
OUTSIDE = 0.5  # of the global model where no partner reaches: it was never trained together with theirs


def blended(
    slicer: Slicer,
    models: Mapping[int, Params],
    widths: Sequence[float],
    weights: Mapping[int, float],
    loss: Callable[[Params], float],
) -> tuple[Params, list[int]]:
    """A model for the client at the end of ``widths``, and the partners that it is made of.

    It begins as the model of the partner with the lowest loss. The others follow from low to high, and each joins the
    mean if that does not raise the loss (a greedy soup: Wortsman et al., "Model soups", 2022). A mean over all of them
    can be much worse than each: partners of another group, and wide coordinates that few have, pull it apart.

    Args:
        models: of the partners, and the newcomer's own part of the global model.
        widths: (N + 1,) of all models.
        weights: partner -> its weight in the mean.
        loss: a model of the newcomer's width -> its loss on the newcomer's data.
    """
    new = len(widths) - 1
    if not weights:
        return models[new], []
    base = {**models, new: {name: OUTSIDE * x for name, x in models[new].items()}}

    def mean(partners: Sequence[int]) -> Params:
        return mixed_over(slicer, new, base, widths, {j: weights[j] for j in partners})

    single = {j: loss(mean([j])) for j in weights}
    first, *others = sorted(single, key=single.__getitem__)
    chosen, lowest = [first], single[first]
    for j in others:
        value = loss(mean([*chosen, j]))
        if value <= lowest:
            chosen, lowest = [*chosen, j], value
    return mean(chosen), sorted(chosen)
