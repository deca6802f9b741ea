"""The schema of job.toml. The docstring under each field is its documentation, also in `config schema`."""

from __future__ import annotations

import math
import re
from pathlib import PurePosixPath
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from elastictrain.core.window import EpochTail

NonNegativeInt = Annotated[int, Field(ge=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """A table of job.toml: unknown keys are refused, values cannot change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


class TrainConfig(Section):
    """How long to train, on how much at once, in which precision."""

    max_steps: PositiveInt | None = None
    """Optimizer steps (windows consumed) after which the run is complete."""
    max_epochs: PositiveInt | None = None
    """Epochs after which the run is complete; give this or max_steps, or both (the first reached ends the run)."""
    micro_batch_size: PositiveInt
    """Samples per forward and backward pass on one rank: as many as fit in memory."""
    global_batch_size: PositiveInt | None = None
    """Samples per optimizer step over all ranks; a multiple of micro_batch_size. Independent of the world size."""
    accumulation_steps: PositiveInt | None = None
    """Instead of global_batch_size: microbatches per rank and step. The global batch this makes at the first start
    (micro_batch_size × accumulation_steps × ranks) is kept ever after, whatever the world size becomes."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Compute precision of forward passes (autocast); parameters and optimizer state stay fp32."""
    tf32: bool = False
    """Allow TensorFloat-32 in fp32 matrix products and convolutions on CUDA."""
    clip_norm: PositiveFloat | None = None
    """Clip the whole window's gradient to this 2-norm, after unscaling."""
    check_gradients: bool = True
    """Skip (and count) an update whose gradient is not finite. fp16 always does. Uses the norm that clipping knows;
    without clipping it computes it."""
    max_consecutive_skips: NonNegativeInt = 10
    """Skipped updates in a row that are borne; one more halts the run with the scale history."""
    deterministic: bool = False
    """Use deterministic kernels only (torch.use_deterministic_algorithms): bitwise repeatable also on CUDA."""

    @model_validator(mode="after")
    def _check(self) -> TrainConfig:
        if self.max_steps is None and self.max_epochs is None:
            raise ValueError("needs max_steps or max_epochs")
        if self.global_batch_size is not None and self.accumulation_steps is not None:
            raise ValueError("takes global_batch_size or accumulation_steps, not both: the second follows the first")
        return self


class ModelConfig(Section):
    """What is done to the task's model before training."""

    compile: bool = False
    """torch.compile the model."""
    compile_backend: str = "inductor"
    """Backend of torch.compile."""
    activation_checkpointing: tuple[str, ...] = ()
    """Modules whose activations are recomputed in the backward pass, by name pattern, such as ["blocks.*"]."""
    channels_last: bool = False
    """Keep 4-d parameters and inputs in channels_last memory format (convolutions on CUDA)."""
    sync_batchnorm: bool = False
    """Replace BatchNorm by SyncBatchNorm: statistics over all ranks' microbatches. CUDA only, as torch has it."""
    ema_decay: Fraction | None = None
    """Keep an exponential moving average of the weights with this decay, updated after each applied step."""


class OptimizerConfig(Section):
    """The optimizer where the task does not make its own. Unset values are those of torch.optim."""

    name: Literal["adamw", "adam", "sgd"] = "adamw"
    """Which optimizer."""
    lr: PositiveFloat = 1e-3
    """Learning rate."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """Weight decay; decoupled for adamw."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    """Adam's decay rates of the first and second moment."""
    eps: PositiveFloat = 1e-8
    """Adam's term against division by zero."""
    momentum: Fraction = 0.0
    """SGD's momentum."""
    nesterov: bool = False
    """SGD with Nesterov momentum."""
    implementation: Literal["auto", "fused", "foreach", "for-loop"] = "auto"
    """Which of torch's implementations; auto takes fused where the device has it. A fused optimizer can leave out an
    update on the device itself, so that skipping costs no synchronisation."""


class ScalerConfig(Section):
    """Loss scaling, used with precision = "fp16" only (torch.amp.GradScaler)."""

    init_scale: PositiveFloat = 65536.0
    """Scale at the start."""
    growth_factor: Annotated[float, Field(gt=1)] = 2.0
    """Factor after growth_interval applied updates in a row."""
    backoff_factor: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Factor after a skipped update."""
    growth_interval: PositiveInt = 2000
    """Applied updates in a row before the scale grows."""


class DdpConfig(Section):
    """Options of DistributedDataParallel, as torch has them."""

    find_unused_parameters: bool = False
    """Needed only by models in which some parameters get no gradient in some steps; costs a graph traversal. With
    elastic.reduction = "tree": in some microbatches; costs a small collective. The tree needs no other of these."""
    gradient_as_bucket_view: bool = True
    """Gradients are views of the reduction buckets: saves one copy of the gradient."""
    static_graph: bool = False
    """The model uses the same parameters in the same order in every step."""
    bucket_cap_mb: PositiveInt = 25
    """Size of a reduction bucket in MiB."""


class DataConfig(Section):
    """How samples are read."""

    shuffle: bool = True
    """Visit each epoch's samples in a keyed random order; false keeps the dataset's own."""
    epoch_tail: EpochTail = EpochTail.CONTINUE
    """At an epoch's end: continue (windows run on), partial (a short, exactly weighted window), or drop."""
    num_workers: NonNegativeInt = 0
    """Loader processes per rank; 0 reads in the training process."""
    prefetch_batches: PositiveInt = 4
    """Microbatches each loader process keeps ready."""
    pin_memory: bool = True
    """Read into page-locked memory and copy beside the computation (CUDA only)."""
    seed_samples: bool = True
    """Seed the generators (torch, random, numpy) before every dataset[i], from (seed, epoch, i). Off saves about
    ten microseconds a sample where dataset[i] draws no random numbers."""


class EvalConfig(Section):
    """When and how to evaluate, if the task has eval_data."""

    every_steps: PositiveInt | None = None
    """Evaluate after every so many steps."""
    every_epochs: PositiveInt | None = None
    """Evaluate after every so many epochs."""
    at_end: bool = True
    """Evaluate when training is complete."""
    micro_batch_size: PositiveInt | None = None
    """Samples per evaluation pass; default: train.micro_batch_size."""
    use_ema: bool = True
    """Evaluate the averaged weights where model.ema_decay is set."""


class EtcdConfig(Section):
    """How to speak to etcd, where elastic.rendezvous names one."""

    user: str | None = None
    """Where etcd asks for one. The password is in password_file, or in ELASTICTRAIN_ETCD_PASSWORD."""
    password_file: str | None = None
    """File that holds the password."""
    ca_cert: str | None = None
    """PEM file of the authority that signed the servers' certificates; default: the system's."""
    cert: str | None = None
    """PEM file of this client's certificate."""
    key: str | None = None
    """PEM file of its key."""


class ElasticConfig(Section):
    """Processes and how they talk."""

    nodes: str = "1"
    """How many nodes take part: a number, or "MIN:MAX". With fewer than MIN the job waits; a node that comes later is
    taken in at the next step boundary, one that is lost is done without."""
    nproc_per_node: PositiveInt = 1
    """Ranks on this node: one per GPU, or as many as you like on CPUs. May differ between nodes."""
    rendezvous: str = "local"
    """Where the supervisors of the nodes find each other: "local" on one node; "c10d://HOST:PORT", where the supervisor
    on HOST serves the store; "etcd://HOST:PORT,HOST:PORT,…", an etcd v3 cluster (docs/nodes.md)."""
    etcd: EtcdConfig = EtcdConfig()
    """How to speak to etcd."""
    node_timeout_s: Annotated[float, Field(ge=0.5)] = 3.0
    """A node that has not been heard of for so long, while the ranks of the others wait in a collective, is done
    without."""
    store_timeout_s: PositiveFloat = 300.0
    """Where the store of the rendezvous cannot be reached, training goes on for so long. Then the ranks stop and wait
    for it, since nodes that took no part so far may have gone on in their place (half a minute later)."""
    last_call_s: NonNegativeFloat = 3.0
    """At the first start: how long to wait for more nodes once there are MIN."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes CUDA where torch sees a device for every local rank."""
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """Collectives: auto takes nccl on CUDA, gloo on CPU."""
    threads_per_rank: PositiveInt | None = None
    """Intra-op threads of a rank; default: the node's cores shared out evenly, at least 1. With reduction = "tree" the
    default is 1, since the number of threads is part of the numbers that come out."""
    reduction: Literal["default", "tree"] = "default"
    """How the microbatches' gradients are summed. default: by DistributedDataParallel, bitwise the same at the same
    world size. tree: along one fixed tree over the microbatches, bitwise the same at every world size; switches
    deterministic kernels on, and refuses what would break the promise (docs/reduction.md)."""
    process_group_timeout_s: PositiveFloat = 600.0
    """A collective that takes longer fails. Longer than every limit of [supervisor]: a hang is to be found, and its
    culprit named, before the collectives of the other ranks give up."""
    rendezvous_timeout_s: PositiveFloat | None = None
    """How long the ranks wait for each other when they meet, and a node for `rendezvous` to name a known host.
    Default: one and a half times process_group_timeout_s."""
    fast_restart: bool = True
    """Fork agents and ranks from a process that has torch imported, so that a restart takes a fraction of a second.
    Off: every process is started anew."""

    @property
    def min_nodes(self) -> int:
        """Of `nodes`."""
        return int(self.nodes.partition(":")[0])

    @property
    def max_nodes(self) -> int:
        """Of `nodes`."""
        return int(self.nodes.rpartition(":")[2])

    @property
    def has_peers(self) -> bool:
        """Whether other nodes may take part."""
        return self.rendezvous != "local"

    @field_validator("nodes", mode="before")
    @classmethod
    def _take_a_number_of_nodes(cls, nodes: Any) -> Any:
        return str(nodes) if isinstance(nodes, int) and not isinstance(nodes, bool) else nodes

    @field_validator("nodes")
    @classmethod
    def _check_nodes(cls, nodes: str) -> str:
        match = re.fullmatch(r"([1-9]\d{0,4})(?::([1-9]\d{0,4}))?", nodes)
        if match is None or int(match[1]) > int(match[2] or match[1]):
            raise ValueError(f'{nodes!r} is neither a number of nodes, such as "2", nor "MIN:MAX", such as "1:4"')
        return nodes

    @field_validator("rendezvous")
    @classmethod
    def _check_rendezvous(cls, rendezvous: str) -> str:
        if rendezvous == "local":
            return rendezvous
        scheme, separator, places = rendezvous.partition("://")
        if not separator or scheme not in ("c10d", "etcd") or not places:
            raise ValueError(f'{rendezvous!r} is none of "local", "c10d://HOST:PORT", "etcd://HOST:PORT,…"')
        if scheme == "c10d" and re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[^:/@,\s]+):[0-9]{1,5}", places) is None:
            raise ValueError(f'{rendezvous!r} is not "c10d://HOST:PORT": one host, and a port')
        if "@" in places:
            raise ValueError("names a user or a password: elastic.etcd.user and password_file are for that")
        return rendezvous

    @model_validator(mode="after")
    def _check_peers(self) -> ElasticConfig:
        if self.max_nodes > 1 and not self.has_peers:
            raise ValueError(
                f'nodes = "{self.nodes}" needs a rendezvous where the nodes find each other: '
                'rendezvous = "c10d://HOST:PORT" or "etcd://…"'
            )
        return self

    @property
    def join_timeout_s(self) -> float:
        """`rendezvous_timeout_s`, resolved."""
        if self.rendezvous_timeout_s is not None:
            return self.rendezvous_timeout_s
        return 1.5 * self.process_group_timeout_s


class MetricsConfig(Section):
    """What is written about the run. metrics.jsonl is always written."""

    every_steps: PositiveInt = 10
    """Steps between two reports. Every step has its line in metrics.jsonl; ranks exchange them once per report."""
    tensorboard: bool = True
    """Also write TensorBoard event files, where tensorboard is installed."""


class CheckpointConfig(Section):
    """Snapshots: where, how often, how many."""

    url: str | None = None
    """Where snapshots are kept: a folder, or whatever fsspec knows (s3://, gs://, az://, memory://). Default: the
    folder snapshots in the state directory."""
    storage_options: dict[str, Any] = Field(default_factory=dict)
    """Passed to fsspec: endpoint, credentials, and so on."""
    every_steps: PositiveInt | None = None
    """Take a snapshot after every so many steps."""
    every_s: PositiveFloat | None = None
    """Take a snapshot when so many seconds have passed since the last one."""
    auto: bool | None = None
    """Choose the interval from the measured cost of a snapshot and the observed time between failures (Young and
    Daly). Default: on where neither every_steps nor every_s is given."""
    max_overhead: Annotated[float, Field(gt=0, lt=1)] = 0.01
    """The largest share of the time that auto may spend on snapshots."""
    keep_last: PositiveInt = 3
    """How many of the newest snapshots to keep. One is deleted only after a newer one was verified."""
    keep_every: PositiveInt | None = None
    """Also keep, for ever, the snapshots whose step is a multiple of this."""
    memory_tier: bool = True
    """Write snapshots to memory first, where they outlive the processes, and to url from there. Off: they are staged
    in the state directory; what an earlier start left in memory is gone on with all the same."""
    memory_path: str = "/dev/shm"
    """The tmpfs of the memory tier. What an earlier start left in another one is gone on with all the same."""
    memory_budget_mb: PositiveInt | None = None
    """The most that the memory tier may take, in MiB; it needs twice the size of a snapshot. Default: what memory_path
    has."""
    verify_uploads: bool = True
    """Read back what was written to an object store, and compare. Off: its sizes are looked at, and retention reads one
    of every keep_last back, before it deletes older ones."""
    storage_timeout_s: PositiveFloat = 60.0
    """A store that moves nothing for so long is given up, and tried afresh; at a start, how long one that fails is
    tried before that is an error."""
    preempt_deadline_s: PositiveFloat = 60.0
    """After SIGTERM: how long to try to make the last snapshot durable."""

    @property
    def is_auto(self) -> bool:
        """Whether the interval is chosen automatically."""
        return self.auto if self.auto is not None else self.every_steps is None and self.every_s is None

    @field_validator("memory_path")
    @classmethod
    def _check_memory_path(cls, path: str) -> str:
        if not PurePosixPath(path).is_absolute():
            raise ValueError("must be an absolute path")
        return path


class SupervisorConfig(Section):
    """When a rank counts as hung, and how often a failed worker group is started again."""

    startup_timeout_s: PositiveFloat | None = None
    """How long a rank may stand still before its first step is done: in each of imports, process group, data, model,
    restoring, compilation. This and the other limits left unset: 80% of elastic.process_group_timeout_s."""
    step_timeout_s: PositiveFloat | None = None
    """How long a rank may stand still in a phase of a step. Default: learnt, ten times the longest of late."""
    min_step_timeout_s: PositiveFloat | None = None
    """What is learnt never goes under this: a step that is slow for once is no hang. Default: 30, or 80% of
    elastic.process_group_timeout_s where that is less."""
    eval_timeout_s: PositiveFloat | None = None
    """How long an evaluation may stand still, between two of its batches."""
    snapshot_timeout_s: PositiveFloat | None = None
    """How long taking a snapshot may stand still."""
    exit_timeout_s: PositiveFloat = 60.0
    """How long a rank may take to end after its last step."""
    teardown_timeout_s: PositiveFloat = 10.0
    """How long the other ranks may take to end once one has failed; one that writes a snapshot has its own limit."""
    stop_timeout_s: PositiveFloat | None = None
    """After SIGTERM or `stop`: when to end ranks that are still there. Default: checkpoint.preempt_deadline_s and 10 s
    more."""
    max_failures: NonNegativeInt = 10
    """Failures without progress within failure_window_s that are borne; one more halts the job. A failure after which
    the job had got further than ever before starts the count anew."""
    failure_window_s: PositiveFloat = 3600.0
    """The window of max_failures."""
    same_step_failures: PositiveInt = 3
    """Failures in a row at the same step that halt the job: it is the step that fails, not the machine."""
    backoff_s: PositiveFloat = 1.0
    """Pause before the second restart without progress; it doubles with each."""
    max_backoff_s: PositiveFloat = 120.0
    """The longest such pause."""
    keep_incarnations: Annotated[int, Field(ge=2)] = 20
    """How many of the newest worker groups to keep the folder of, with what their ranks printed; and those of all
    incidents that are kept."""
    keep_incidents: PositiveInt = 20
    """How many of the newest incidents to keep the evidence of."""
    control_group: str | None = None
    """Members of this group may use the control socket too. Default: the supervisor's own group."""
    metrics_port: Annotated[int, Field(ge=0, lt=65536)] | None = None
    """Serve /metrics for Prometheus on this loopback port as well; 0 takes a free one. Default: on the socket only."""

    DEFAULT_SHARE: ClassVar[float] = 0.8
    """Of the process group's timeout, for the limits that are unset."""
    DEFAULT_MIN_STEP_S: ClassVar[float] = 30.0
    """Of min_step_timeout_s, where the process group's timeout allows for it."""


class JobConfig(Section):
    """One training run."""

    name: str
    """Name of the job; default: the folder's name, for a file called job.toml, else the file's."""
    task: str
    """The task: "package.module:Class". The folder of job.toml is on the module path."""
    seed: NonNegativeInt = 0
    """Everything random in the run follows from this."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Passed to the task's constructor as keyword arguments."""
    train: TrainConfig
    model: ModelConfig = ModelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    scaler: ScalerConfig = ScalerConfig()
    ddp: DdpConfig = DdpConfig()
    data: DataConfig = DataConfig()
    eval: EvalConfig = EvalConfig()
    elastic: ElasticConfig = ElasticConfig()
    metrics: MetricsConfig = MetricsConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    supervisor: SupervisorConfig = SupervisorConfig()

    @property
    def deterministic(self) -> bool:
        """Whether only deterministic kernels may be used."""
        return self.train.deterministic or self.elastic.reduction == "tree"

    @model_validator(mode="after")
    def _check_reduction(self) -> JobConfig:
        if self.elastic.reduction == "tree":
            refused = {
                "ddp.static_graph": (self.ddp.static_graph, "is a way of DistributedDataParallel's to reduce"),
                "model.sync_batchnorm": (
                    self.model.sync_batchnorm,
                    "takes statistics over the ranks' microbatches, which change with the number of ranks",
                ),
                "model.compile": (
                    self.model.compile,
                    "compiles kernels for the shapes that a rank happens to have seen, which changes the numbers",
                ),
            }
            for name, (is_set, why) in refused.items():
                if is_set:
                    raise ValueError(f'{name} = true does not go with elastic.reduction = "tree": it {why}')
        return self

    @model_validator(mode="after")
    def _check_order_of_timeouts(self) -> JobConfig:
        collective_s = self.elastic.process_group_timeout_s
        for name in (
            "startup_timeout_s",
            "step_timeout_s",
            "min_step_timeout_s",
            "eval_timeout_s",
            "snapshot_timeout_s",
        ):
            value_s = getattr(self.supervisor, name)
            if value_s is not None and value_s >= collective_s:
                raise ValueError(
                    f"supervisor.{name} = {value_s:g} is not below elastic.process_group_timeout_s = {collective_s:g}: "
                    "the collectives of the other ranks would fail before the hung one is found"
                )
        if self.elastic.join_timeout_s <= collective_s:
            raise ValueError(
                f"elastic.rendezvous_timeout_s = {self.elastic.join_timeout_s:g} is not above "
                f"elastic.process_group_timeout_s = {collective_s:g}: a node would give up waiting for ranks that are "
                "still waiting for their collectives to fail"
            )
        return self

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if not name or PurePosixPath(name).name != name or name.startswith(".") or any(c.isspace() for c in name):
            raise ValueError("must be usable as a folder name: no slash, no space, no leading dot")
        return name

    @field_validator("task")
    @classmethod
    def _check_task(cls, task: str) -> str:
        module, colon, attribute = task.partition(":")
        parts = [*module.split("."), attribute]
        if not colon or not all(part.isidentifier() for part in parts):
            raise ValueError('must be "package.module:Class", such as "my_pkg.train:MyTask"')
        return task

    @field_validator("seed")
    @classmethod
    def _check_seed(cls, seed: int) -> int:
        if seed >= 1 << 64:
            raise ValueError("must fit in 64 bits")
        return seed

    @field_validator("params")
    @classmethod
    def _check_params(cls, params: dict[str, Any]) -> dict[str, Any]:
        for key, value in params.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{key} is not a finite number")
            if not key.isidentifier():
                raise ValueError(f"{key!r} cannot be a keyword argument")
        return params
