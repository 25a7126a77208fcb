"""Where a dedicated teacher runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from silverspoon_ray.errors import ConfigError

STRATEGIES = ("pp", "tp", "sharded")
PLACEMENT_STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
DEVICE_TYPES = ("cuda", "cpu")


@dataclass(frozen=True)
class TeacherPlacement:
    """Devices of its own for the teacher.

    A device is one GPU where Ray offers GPUs and one CPU slot elsewhere; everything else is the same for both.

    Args:
        strategy: how one replica is laid out over its devices: ``"pp"`` (pipeline stages), ``"tp"`` (tensor
            parallel) or ``"sharded"`` (FSDP2).
        num_devices: devices per replica.
        replicas: copies of the whole layout; requests go to the least loaded one.
        teacher_only_devices: silverspoon-kd's form, a list of device numbers. Ray chooses the devices, so only its
            length counts: it gives ``num_devices``.
        wrap_cls: ``"sharded"`` only: class name or names of the layers to wrap.
        device_type: ``"cuda"``, ``"cpu"``, or None: ``"cuda"`` where Ray offers GPUs, else ``"cpu"``.
        resources_per_device: further Ray resources for each device, e.g. ``{"teacher_node": 1}``.
        accelerator_type: e.g. ``"H100"``, as in Ray's accelerator labels.
        placement_strategy: the placement group's strategy, one of Ray's four.
        startup_timeout_s: seconds until the group must be ready, devices and model loading together.

    Raises:
        ConfigError: a value is out of its range; the message names it.
    """

    strategy: str = "pp"
    num_devices: int = 1
    replicas: int = 1
    teacher_only_devices: Sequence[int] | None = None
    wrap_cls: str | Sequence[str] | None = None
    device_type: str | None = None
    resources_per_device: Mapping[str, float] | None = None
    accelerator_type: str | None = None
    placement_strategy: str = "PACK"
    startup_timeout_s: float = 600

    def __post_init__(self) -> None:
        self._check_choice("strategy", STRATEGIES)
        self._check_choice("placement_strategy", PLACEMENT_STRATEGIES)
        if self.device_type is not None:
            self._check_choice("device_type", DEVICE_TYPES)
        if self.teacher_only_devices is not None:
            devices = self.teacher_only_devices
            if isinstance(devices, str) or not isinstance(devices, Sequence) or len(devices) == 0:
                raise ConfigError("teacher_placement.teacher_only_devices", devices, "a non-empty list of numbers")
            if self.num_devices not in (1, len(devices)):
                raise ConfigError(
                    "teacher_placement.num_devices",
                    self.num_devices,
                    f"{len(devices)}, the length of teacher_only_devices, or leave one of the two out",
                )
            object.__setattr__(self, "num_devices", len(devices))
        for name in ("num_devices", "replicas"):
            count = getattr(self, name)
            if not isinstance(count, int) or isinstance(count, bool) or count < 1:
                raise ConfigError(f"teacher_placement.{name}", count, "a whole number of 1 or more")
        if isinstance(self.startup_timeout_s, bool) or not isinstance(self.startup_timeout_s, int | float):
            raise ConfigError("teacher_placement.startup_timeout_s", self.startup_timeout_s, "seconds, as a number")
        if not 0 < self.startup_timeout_s < float("inf"):
            raise ConfigError("teacher_placement.startup_timeout_s", self.startup_timeout_s, "seconds, more than 0")
        if self.wrap_cls is not None and self.strategy != "sharded":
            raise ConfigError("teacher_placement.wrap_cls", self.wrap_cls, 'None, unless strategy="sharded"')
        names = self.wrap_cls if isinstance(self.wrap_cls, Sequence) else [self.wrap_cls]
        if self.wrap_cls is not None and not (names and all(isinstance(name, str) for name in names)):
            raise ConfigError("teacher_placement.wrap_cls", self.wrap_cls, "a class name, or a list of them")
        if self.resources_per_device is not None and not isinstance(self.resources_per_device, Mapping):
            expected = "a mapping of resource names to amounts"
            raise ConfigError("teacher_placement.resources_per_device", self.resources_per_device, expected)
        if self.accelerator_type is not None and not (self.accelerator_type and isinstance(self.accelerator_type, str)):
            raise ConfigError("teacher_placement.accelerator_type", self.accelerator_type, "a name such as 'H100'")
        for name, amount in (self.resources_per_device or {}).items():
            if isinstance(amount, bool) or not isinstance(amount, int | float) or not 0 < amount < float("inf"):
                raise ConfigError(f"teacher_placement.resources_per_device.{name}", amount, "an amount above 0")

    def _check_choice(self, name: str, allowed: tuple[str, ...]) -> None:
        value = getattr(self, name)
        if value not in allowed:
            raise ConfigError(f"teacher_placement.{name}", value, "one of " + ", ".join(map(repr, allowed)))

    @classmethod
    def from_value(cls, value: TeacherPlacement | Mapping[str, Any]) -> TeacherPlacement:
        """The placement itself, or one made from a mapping of its keywords.

        Raises:
            ConfigError: an unknown keyword, or a value out of its range.
        """
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise ConfigError("teacher_placement", value, "a TeacherPlacement or a mapping of its keywords")
        names = list(cls.__dataclass_fields__)
        for key in value:
            if key not in names:
                raise ConfigError(f"teacher_placement.{key}", value[key], "unknown; known are " + ", ".join(names))
        return cls(**value)
