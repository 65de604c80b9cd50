"""Small models of the kinds people train: the second part of the coverage table (`python -m submodels.coverage`).

Recurrent models, transformers, segmentation, other images, video, graphs, tables, audio, and idioms that are hard to
cut. None is tuned to the package: they are written as their authors write them, literal sizes and all.
"""

from submodels.gallery import attention, audio, blocks, graphs, idioms, images, pretrained, recurrent, scenes, tables
from submodels.gallery.case import Case

MODELS: dict[str, Case] = {
    f"{kind}:{name}": case
    for kind, cases in {
        "recurrent": recurrent.MODELS,
        "transformer": attention.MODELS | blocks.MODELS,
        "huggingface": pretrained.MODELS,
        "segmentation": images.SEGMENTATION | scenes.SEGMENTATION,
        "image": scenes.MODELS,
        "video": images.VIDEO,
        "graph": graphs.MODELS | tables.GRAPHS,
        "table": tables.MODELS,
        "audio": audio.MODELS,
        "idiom": idioms.MODELS,
    }.items()
    for name, case in cases.items()
}
