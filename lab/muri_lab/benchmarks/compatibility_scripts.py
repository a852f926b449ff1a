"""The scripts of benchmarks/compatibility.py: source, stand-in for data, and command line.

They are third-party scripts, from cloned repositories (FOLDER/owner/name) or installed packages. Each runs in a copy of
its folder, in which compatibility_data.py has put the data that it would download.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
ACCELERATE_LAUNCH = ("-m", "accelerate.commands.launch", "--cpu", "--num_machines", "1", "--mixed_precision", "no",
                     "--dynamo_backend", "no")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Edit:
    """A change of a script that would download data, asks for a GPU or sets no seed."""

    file: str  # The file, from the folder `src`
    old: str  # What must be in it
    new: str  # What replaces it


@dataclass(frozen=True, slots=True)
class Script:
    """One script."""

    name: str  # unique name
    source: str  # Its repository as `owner/name`, or the package that has it
    command: tuple[str, ...]  # It and its arguments, as after `python`; `bin/NAME` is a command of an installed package
    copies: Mapping[str, str] = field(default_factory=dict)  # Folders and files of the repository, and where they go
    data: tuple[tuple[str, str], ...] = ()  # kinds of compatibility_data.py, each with its folder
    texts: Mapping[str, str] = field(default_factory=dict)  # Small files that are put beside it
    edits: tuple[Edit, ...] = ()  # What is replaced in it
    environment: Mapping[str, str] = field(default_factory=dict)  # Variables of its own
    processes: int = 1  # processes that train or write at once: with several the order of lines is not a result
    cwd: str = "src"  # Where it runs

    @property
    def from_repository(self) -> bool:
        """Whether it comes from a cloned repository."""
        return "/" in self.source


def _example(name: str, *arguments: str, folder: str = "", script: str = "main.py", **more: object) -> Script:
    """One of PyTorch's examples."""
    return Script(
        name, "pytorch/examples", (script, *arguments), copies={folder or name.replace("-", "_"): "src"},
        **more,  # type: ignore[arg-type]
    )  # fmt: skip


_MNIST = (("mnist", "data"),)
_HERE = (("mnist", "src"),)
_ACCELERATE = "huggingface/accelerate"
# The metric comes from a hub; the scripts use three of its methods.
_EVALUATE = """
class Metric:
    def __init__(self):
        self.right = self.seen = 0
    def add_batch(self, predictions, references):
        self.right += int((predictions == references).sum())
        self.seen += len(references)
    def compute(self):
        return {"accuracy": self.right / self.seen}
def load(*names):
    return Metric()
"""
_BERT = (("tiny_bert", "src/bert-base-cased"), ("mrpc", "src/tests/test_samples/MRPC"))
_MOCKED = {"TESTING_MOCKED_DATALOADERS": "1"}
_OPENAI = "class openai_object:\n    OpenAIObject = dict\n"
_ALPACA_EDITS = (
    Edit("train.py", "Trainer(model=model, tokenizer=tokenizer,", "Trainer(model=model, processing_class=tokenizer,"),
)
_SEED = "import torch; torch.manual_seed(0); import numpy; numpy.random.seed(0); import random; random.seed(0)\n"


def _accelerate(name: str, file: str, *arguments: str, launch: tuple[str, ...] = (), processes: int = 1) -> Script:
    return Script(
        name, _ACCELERATE, (*launch, file.rpartition("/")[2], "--cpu", *arguments), copies={f"examples/{file}": "src/"},
        data=_BERT, texts={"src/evaluate.py": _EVALUATE}, environment=_MOCKED, processes=processes,
    )  # fmt: skip


def _alpaca(name: str, accumulation: int) -> Script:
    options = {"model_name_or_path": "llama", "data_path": "alpaca.json", "output_dir": "out", "num_train_epochs": 2,
               "per_device_train_batch_size": 2, "gradient_accumulation_steps": accumulation, "learning_rate": 2e-3,
               "logging_steps": 1, "report_to": "none", "use_cpu": True, "model_max_length": 64}  # fmt: skip
    arguments = [word for key, value in options.items() for word in (f"--{key}", str(value))]
    return Script(
        name, "tatsu-lab/stanford_alpaca", ("train.py", *arguments), copies={"train.py": "src/", "utils.py": "src/"},
        data=(("tiny_llama", "src/llama"), ("alpaca", "src")), texts={"src/openai.py": _OPENAI}, edits=_ALPACA_EDITS,
    )  # fmt: skip


_NANOGPT = {
    "out_dir": "out", "eval_interval": 10, "eval_iters": 2, "log_interval": 1, "block_size": 32, "batch_size": 4,
    "n_layer": 2, "n_head": 2, "n_embd": 32, "max_iters": 30, "lr_decay_iters": 30, "dropout": 0.1, "device": "cpu",
    "dtype": "float32",
}  # fmt: skip


def _nanogpt(name: str, environment: Mapping[str, str] | None = None, **more: object) -> Script:
    options = (f"--{key}={value}" for key, value in (_NANOGPT | more).items())
    return Script(
        name, "karpathy/nanoGPT", ("train.py", "config/train_shakespeare_char.py", *options),
        copies=dict.fromkeys(("train.py", "model.py", "configurator.py", "config"), "src/"),
        data=(("characters", "src/data/shakespeare_char"),), environment=environment or {},
    )  # fmt: skip


def _mingpt(name: str, folder: str, *arguments: str, **more: object) -> Script:
    return Script(
        name, "karpathy/minGPT", (f"{folder}.py", *arguments),
        copies={f"projects/{folder}": "src", "mingpt": "src/mingpt"},
        **more,  # type: ignore[arg-type]
    )  # fmt: skip


_TIMM = ("train.py", "images", "--model", "resnet10t", "--img-size", "64", "--batch-size", "4", "--epochs", "1",
         "--num-classes", "2", "--workers", "1", "--device", "cpu", "--output", "out", "--experiment", "run",
         "--log-interval", "1", "--seed", "42")  # fmt: skip


def _timm(name: str, *arguments: str, launch: tuple[str, ...] = (), **more: object) -> Script:
    return Script(
        name, "huggingface/pytorch-image-models", (*launch, *_TIMM, *arguments),
        copies={"train.py": "src/", "timm": "src/timm"}, data=(("images", "src/images"),),
        **more,  # type: ignore[arg-type]
    )  # fmt: skip


def _wandb(name: str, folder: str, script: str, **more: object) -> Script:
    return Script(
        name, "wandb/examples", (script,), copies={f"examples/{folder}": "src"},
        environment={"WANDB_MODE": "offline", "WANDB_SILENT": "true"}, processes=2,  # its service is one
        **more,  # type: ignore[arg-type]
    )  # fmt: skip


_TUTORIAL = "distributed/ddp-tutorial-series"
_ON_CPU = (
    Edit("multigpu_torchrun.py", 'torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))', "torch.manual_seed(0)"),
    Edit("multigpu_torchrun.py", '"nccl"', '"gloo"'),
    Edit("multigpu_torchrun.py", "model.to(self.gpu_id)", "model"),
    Edit("multigpu_torchrun.py", "DDP(self.model, device_ids=[self.gpu_id])", "DDP(self.model)"),
    Edit("multigpu_torchrun.py", "source.to(self.gpu_id)", "source"),
    Edit("multigpu_torchrun.py", "targets.to(self.gpu_id)", "targets"),
)
_LIGHTNING = "Lightning-AI/pytorch-lightning"
_FIT = ("fit", "--trainer.max_epochs", "1", "--trainer.accelerator", "cpu", "--trainer.limit_train_batches", "20",
        "--trainer.limit_val_batches", "4", "--seed_everything", "7")  # fmt: skip

SCRIPTS: tuple[Script, ...] = (
    _example("mnist", "--epochs", "1", "--no-accel", "--save-model", data=_MNIST),
    _example("mnist-rnn", "--epochs", "1", "--batch-size", "32", "--save-model", data=_MNIST),
    _example("mnist-forward-forward", "--epochs", "3", "--no_accel", "--train_size", "256", "--test_size", "64",
             "--save_model", data=(("mnist", "src/data"),), edits=(
        Edit("main.py", "import torch\n", _SEED),)),
    _example("mnist-hogwild", "--epochs", "1", data=_MNIST, processes=2),
    _example("vae", "--epochs", "2", "--no-accel", data=_MNIST, texts={"src/results/.keep": ""}),
    _example("siamese-network", "--epochs", "1", "--no-accel", "--batch-size", "32", data=_MNIST, edits=(
        Edit("main.py", "torch.manual_seed(args.seed)", "torch.manual_seed(args.seed); random.seed(0)"),)),
    _example("dcgan", "--dataset", "fake", "--batchSize", "50", "--imageSize", "64", "--ngf", "4",
             "--ndf", "4", "--niter", "1", "--manualSeed", "3", "--workers", "1"),
    _example("word-lstm", "--epochs", "1", "--emsize", "32", "--nhid", "32", folder="word_language_model",
             data=(("words", "src/data/wikitext-2"),)),
    _example("word-transformer", "--epochs", "1", "--emsize", "32", "--nhid", "32", "--model", "Transformer",
             "--lr", "1", folder="word_language_model", data=(("words", "src/data/wikitext-2"),)),
    _example("time-sequence", "--steps", "1", folder="time_sequence_prediction", script="train.py",
             data=(("sines", "src"),), edits=(  # it is older than the default that refuses NumPy's arrays
        Edit("train.py", "torch.load('traindata.pt')", "torch.load('traindata.pt', weights_only=False)"),)),
    _example("regression", edits=(Edit("main.py", "POLY_DEGREE = 4", "POLY_DEGREE = 4; torch.manual_seed(0)"),)),
    _example("reinforce", folder="reinforcement_learning", script="reinforce.py", edits=(
        Edit("reinforce.py", "in count(1)", "in range(1, 60)"),)),
    _example("actor-critic", folder="reinforcement_learning", script="actor_critic.py", edits=(
        Edit("actor_critic.py", "in count(1)", "in range(1, 60)"),)),
    _example("super-resolution", "--upscale_factor", "3", "--batchSize", "4", "--testBatchSize", "4", "--nEpochs", "2",
             "--threads", "2", data=(("bsds", "src/dataset/BSDS300/images"),)),
    _example("gcn", "--epochs", "40", "--no-accel", data=(("cora", "src/cora"),), edits=(
        Edit("main.py", "with requests.get(cora_url, stream=True) as tgz_file:", "if False:"),)),
    _example("gat", "--epochs", "10", "--no-accel", "--hidden-dim", "16", data=(("cora", "src/cora"),)),
    _example("imagenet", "images", "--epochs", "1", "--batch-size", "8", "--workers", "2", "--no-accel", "--seed", "5",
             "--print-freq", "1", data=(("images", "src/images"),)),
    _nanogpt("nanogpt", compile=False),
    _nanogpt("nanogpt-accumulation", compile=False, gradient_accumulation_steps=4, max_iters=12),
    _nanogpt("nanogpt-torch-compile", {"TORCHINDUCTOR_CACHE_DIR": "{src}/.inductor"}, compile=True, max_iters=60,
             eval_interval=100, n_layer=1),
    _mingpt("mingpt-adder", "adder", "--trainer.max_iters=60", "--trainer.num_workers=2"),
    _mingpt("mingpt-chargpt", "chargpt", "--model.model_type=gpt-nano", "--data.block_size=16",
            "--trainer.max_iters=40", "--trainer.batch_size=8", data=(("characters", "src"),)),
    _timm("timm-train"),
    _timm("timm-train-accumulation", "--grad-accum-steps", "2", "--opt", "adamw", "--model-ema"),
    _timm("timm-torchrun-ddp", launch=TORCHRUN, processes=2, edits=(
        Edit("timm/task/classification.py", "device_ids=device_ids, **", "**"),)),
    Script("yolov8", "ultralytics",
           ("bin/yolo", "detect", "train", "model=yolov8n.yaml", "data=boxes.yaml", "epochs=2", "imgsz=32", "batch=4",
            "nbs=4", "workers=1", "device=cpu", "project=out", "plots=False", "pretrained=False", "seed=0"),
           data=(("boxes", "src"),), environment={"YOLO_CONFIG_DIR": "{src}/settings", "YOLO_OFFLINE": "true"}),
    _alpaca("hf-trainer", 1),
    _alpaca("hf-trainer-accumulation", 4),
    _accelerate("accelerate-memory", "by_feature/memory.py"),
    _accelerate("accelerate-accumulation", "by_feature/gradient_accumulation.py", "--gradient_accumulation_steps", "4"),
    _accelerate("accelerate-launch", "by_feature/tracking.py", launch=(*ACCELERATE_LAUNCH, "--num_processes", "1")),
    _accelerate("accelerate-launch-2", "by_feature/local_sgd.py",
                launch=(*ACCELERATE_LAUNCH, "--num_processes", "2"), processes=2),
    _accelerate("accelerate-checkpointing", "by_feature/checkpointing.py", "--checkpointing_steps", "epoch"),
    Script("ddp-tutorial", "pytorch/examples", (*TORCHRUN, "multigpu_torchrun.py", "4", "2"),
           copies={_TUTORIAL: "src"}, edits=_ON_CPU, processes=2),
    Script("lightning-autoencoder", _LIGHTNING, ("autoencoder.py", *_FIT[1:]),
           copies={"examples/pytorch/basics/autoencoder.py": "src/basics/autoencoder/"},
           edits=(Edit("basics/autoencoder/autoencoder.py", "[55000, 5000]", "[512, 128]"),),
           cwd="src/basics/autoencoder", data=(("mnist", "src/Datasets"), ("mnist", "src/basics/autoencoder/data"))),
    Script("lightning-bug-report", _LIGHTNING, ("bug_report_model.py",), copies={"examples/pytorch/bug_report": "src"},
           edits=(Edit("bug_report_model.py", "def run():\n", f"def run():\n    {_SEED}"),
                  Edit("bug_report_model.py", "limit_train_batches=1,", "limit_train_batches=30, accelerator='cpu',"))),
    Script("fabric-image-classifier", _LIGHTNING, ("train_fabric.py", "--epochs", "1"),
           copies={"examples/fabric/image_classifier": "src/fabric/image_classifier"},
           data=(("mnist", "Datasets"),), cwd="src/fabric/image_classifier"),
    Script("ignite-mnist", "pytorch/ignite", ("mnist.py", "--epochs", "1"), copies={"examples/mnist": "src"},
           data=_HERE, edits=(Edit("mnist.py", "import torch\n", f"{_SEED}"),)),
    _wandb("wandb-mnist", "pytorch/pytorch-cnn-mnist", "main.py", data=_MNIST),
    Script("optuna-pytorch", "optuna/optuna-examples", ("pytorch_simple.py",),
           copies={"pytorch/pytorch_simple.py": "src/"}, data=(("mnist", "src"),), edits=(
        Edit("pytorch_simple.py", "n_trials=100", "n_trials=3"),
        Edit("pytorch_simple.py", 'create_study(direction="maximize")',
             'create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=0))'),
        Edit("pytorch_simple.py", "import torch\n", _SEED))),
    Script("skorch-cli", "skorch-dev/skorch", ("train.py", "net", "--n_samples", "400", "--output_file", "net.pkl"),
           copies={"examples/cli": "src"}),
    Script("joblib-random-state", "joblib/joblib", ("parallel_random_state.py",),
           copies={"examples/parallel_random_state.py": "src/"},
           edits=(Edit("parallel_random_state.py", "import numpy as np\n",
                       "import numpy as np; np.random.seed(0)\n"),)),
    Script("hydra-working-directory", "facebookresearch/hydra", ("my_app.py", "hydra.run.dir=out"),
           copies={"examples/tutorials/basic/running_your_hydra_app/3_working_directory": "src"}),
)  # fmt: skip

TWINS = (
    ("hf-trainer", "hf-trainer-accumulation"),
    ("accelerate-memory", "accelerate-accumulation"),
    ("nanogpt", "nanogpt-accumulation"),
    ("timm-train", "timm-train-accumulation"),
)
"""Pairs that differ in gradient accumulation and little else: what one keeps for its whole process harms the other."""
