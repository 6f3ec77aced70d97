"""Train AlexNet on pictures of CIFAR-10's size, with DeepSpeed's pipeline calls.

    zeroshard launch --as-deepspeed --nproc 2 examples/pipeline_alexnet/train.py \\
        --deepspeed_config examples/pipeline_alexnet/ds_config.json

The program is written for DeepSpeed and does not mention ZeroShard. Pictures are drawn from a fixed seed:
each class has a pattern, and noise covers it. ``--cifar FOLDER`` reads CIFAR-10 with torchvision instead.
"""

from __future__ import annotations

import argparse

import deepspeed
import torch
from deepspeed.pipe import PipelineModule
from deepspeed.utils import RepeatingLoader
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

CLASSES, SIDE = 10, 32


class AlexNet(nn.Module):
    """The network of Krizhevsky, 2014 (arXiv 1404.5997), with strides for pictures of 32 x 32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        a, b, c = width, 3 * width, 6 * width
        self.features = nn.Sequential(
            nn.Conv2d(3, a, kernel_size=5, stride=1, padding=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(kernel_size=2),
            nn.Conv2d(a, b, kernel_size=5, padding=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(kernel_size=2),
            nn.Conv2d(b, c, kernel_size=3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(c, 4 * a, kernel_size=3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(4 * a, 4 * a, kernel_size=3, padding=1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(kernel_size=2),
        )
        self.pool = nn.AdaptiveAvgPool2d((2, 2))
        self.classifier = nn.Sequential(
            nn.Dropout(0.0),
            nn.Linear(16 * a, 16 * a),
            nn.ReLU(inplace=True),
            nn.Dropout(0.0),
            nn.Linear(16 * a, 8 * a),
            nn.ReLU(inplace=True),
            nn.Linear(8 * a, CLASSES),
        )

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return self.classifier(torch.flatten(self.pool(self.features(x_BCHW)), 1))


def as_layers(net: AlexNet) -> list[object]:
    """The layers of the network in a row: modules, and a function between them."""
    return [*net.features, net.pool, lambda x: torch.flatten(x, 1), *net.classifier]


def train_base(args: argparse.Namespace, data: Dataset) -> list[float]:
    """Data parallelism: forward, backward and step are written out."""
    net = AlexNet(args.width)
    engine, _, loader, _ = deepspeed.initialize(
        args=args, model=net, model_parameters=net.parameters(), training_data=data
    )
    batches, criterion, losses = RepeatingLoader(loader), nn.CrossEntropyLoss(), []
    for step in range(args.steps * engine.gradient_accumulation_steps()):
        inputs, labels = (part.to(engine.device) for part in next(batches))
        loss = criterion(engine(inputs), labels)
        engine.backward(loss)
        if engine.is_gradient_accumulation_boundary():
            losses.append(float(loss))
            report(args, step // engine.gradient_accumulation_steps() + 1, losses[-1])
        engine.step()
    return losses


def train_pipe(args: argparse.Namespace, data: Dataset) -> list[float]:
    """Pipeline stages: the engine runs the micro-batches of a step."""
    net = PipelineModule(
        layers=as_layers(AlexNet(args.width)),
        loss_fn=nn.CrossEntropyLoss(),
        num_stages=args.stages,
        partition_method=args.partition,
        activation_checkpoint_interval=0,
    )
    engine, _, _, _ = deepspeed.initialize(
        args=args,
        model=net,
        model_parameters=[p for p in net.parameters() if p.requires_grad],
        training_data=data,
    )
    losses = []
    for step in range(args.steps):
        losses.append(float(engine.train_batch()))
        report(args, step + 1, losses[-1])
    if args.save:
        engine.save_checkpoint(args.save)
    return losses


def report(args: argparse.Namespace, step: int, loss: float) -> None:
    if deepspeed.comm.get_rank() == 0 and (step == 1 or step % max(1, args.steps // 10) == 0):
        print(f"step {step:4d} of {args.steps}   loss {loss:.4f}", flush=True)


def drawn(count: int, seed: int) -> Dataset:
    """Pictures ``[3, 32, 32]`` and their classes, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.randn(CLASSES, 3, 4, 4, generator=generator)
    patterns = nn.functional.interpolate(coarse, size=(SIDE, SIDE), mode="bilinear")
    labels = torch.randint(CLASSES, (count,), generator=generator)
    noise = torch.randn(count, 3, SIDE, SIDE, generator=generator)
    return TensorDataset(patterns[labels] + 0.5 * noise, labels)


def cifar(folder: str) -> Dataset:
    """CIFAR-10 from a folder that has it."""
    from torchvision import datasets, transforms

    means = ((0.491, 0.482, 0.447), (0.247, 0.243, 0.262))
    steps = transforms.Compose([transforms.ToTensor(), transforms.Normalize(*means)])
    return datasets.CIFAR10(folder, train=True, transform=steps)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--stages", type=int, default=2, help="0: data parallelism alone")
    parser.add_argument("--partition", default="parameters", help="uniform, type:conv...")
    parser.add_argument("--width", type=int, default=16, help="channels of the first layer")
    parser.add_argument("--cifar", help="folder with CIFAR-10")
    parser.add_argument("--save", help="folder for a checkpoint at the end")
    parser.add_argument("--seed", type=int, default=1138)
    parser = deepspeed.add_config_arguments(parser)
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    deepspeed.init_distributed()
    deepspeed.runtime.utils.set_random_seed(args.seed)
    data = cifar(args.cifar) if args.cifar else drawn(4096, args.seed)
    train = train_pipe if args.stages else train_base
    train(args, data)


if __name__ == "__main__":
    main()
