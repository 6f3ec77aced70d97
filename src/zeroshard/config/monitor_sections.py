"""The sections of a configuration that are about monitors, each under its key."""

from __future__ import annotations

from zeroshard.config.fields import Count, Flag, Section, Text, honour


class FileMonitorConfig(Section):
    enabled: Flag = honour(False, "Write metrics.")
    output_path: Text = honour("", "Directory for the files. Empty: the working directory.")
    job_name: Text = honour("DeepSpeedJobName", "Name of the run's folder in that directory.")


class WandbConfig(Section):
    enabled: Flag = honour(False, "Send metrics. The package wandb must be installed.")
    group: Text | None = honour(None, "Group of the run.")
    team: Text | None = honour(None, "Entity of the run.")
    project: Text = honour("deepspeed", "Project of the run.")


class CometConfig(Section):
    enabled: Flag = honour(False, "Send metrics. The package comet_ml must be installed.")
    samples_log_interval: Count = honour(100, "Number of samples between two metrics.")
    project: Text | None = honour(None, "Project of the run.")
    workspace: Text | None = honour(None, "Workspace of the run.")
    api_key: Text | None = honour(None, "API key of the account. It is never printed.")
    experiment_name: Text | None = honour(None, "Name of the run.")
    experiment_key: Text | None = honour(None, "Unique key of the run.")
    online: Flag | None = honour(None, "true: send metrics. false: write them to disk.")
    mode: Text | None = honour(None, "Whether to start a new run or continue one.")


class TrackioConfig(Section):
    enabled: Flag = honour(False, "Write metrics. The package trackio must be installed.")
    project: Text = honour("zeroshard", "Project of the run.")
    space_id: Text | None = honour(None, "Space that shows the run. null: only files on this host.")


class MlflowConfig(Section):
    enabled: Flag = honour(False, "Send metrics. The package mlflow must be installed.")
    tracking_uri: Text | None = honour(
        None,
        "Server or database of the runs, for example sqlite:///runs.db. null: MLflow's own setting.",
    )
    experiment: Text = honour("zeroshard", "Experiment of the run.")
    run_name: Text | None = honour(None, "Name of the run. null: MLflow chooses one.")


class MonitorSections(Section):
    """Each key is one of ``metrics/sinks.py: SINKS``. Ranks may differ in them: many programs log on rank
    0 only."""

    tensorboard: FileMonitorConfig = honour(FileMonitorConfig, "Write metrics for TensorBoard.")
    csv_monitor: FileMonitorConfig = honour(FileMonitorConfig, "Write metrics to CSV files.")
    wandb: WandbConfig = honour(WandbConfig, "Send metrics to Weights & Biases.")
    comet: CometConfig = honour(CometConfig, "Send metrics to Comet.")
    trackio: TrackioConfig = honour(TrackioConfig, "Send metrics to Trackio.")
    mlflow: MlflowConfig = honour(MlflowConfig, "Send metrics to MLflow.")
