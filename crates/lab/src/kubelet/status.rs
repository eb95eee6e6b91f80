//! The status that a kubelet reports: pure functions from the pod and the state of its containers to a PodStatus.

use jiff::Timestamp;
use k8s_openapi::{
    api::core::v1::{
        Container, ContainerState, ContainerStateRunning, ContainerStateTerminated, ContainerStateWaiting,
        ContainerStatus, HostIP, Pod, PodCondition, PodIP, PodStatus,
    },
    apimachinery::pkg::apis::meta::v1::Time,
};
use sha2::{Digest, Sha256};

use super::CRASH_MESSAGE;
use crate::hex::hex;

/// The state of a pod's containers. Init containers have ended, except in the states that name them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ContainersState {
    Running {
        ready: bool,
    },
    /// The process keeps exiting and waits for its next restart.
    Crashing,
    /// The first init container keeps exiting.
    InitCrashing,
    /// The images do not exist.
    ImageMissing,
    Ended {
        success: bool,
    },
}

pub(crate) struct StatusInput<'a> {
    pub(crate) pod: &'a Pod,
    pub(crate) containers: ContainersState,
    /// How often the containers were restarted. It never decreases.
    pub(crate) restarts: i32,
    pub(crate) pod_ip: &'a str,
    pub(crate) host_ip: &'a str,
    pub(crate) started: Timestamp,
    pub(crate) now: Timestamp,
}

/// A pod is ready when its containers are ready and every readiness gate is True. The owner of a gate sets it: for
/// `kubevirt.io/virtual-machine-unpaused` that is virt-controller.
pub(crate) fn is_ready(pod: &Pod, containers: ContainersState) -> bool {
    let gates = pod.spec.as_ref().and_then(|spec| spec.readiness_gates.as_ref());
    let conditions = pod.status.as_ref().and_then(|status| status.conditions.as_ref());
    let open = |gate: &str| {
        conditions.into_iter().flatten().any(|condition| condition.type_ == gate && condition.status == "True")
    };
    containers == ContainersState::Running { ready: true }
        && gates.into_iter().flatten().all(|gate| open(&gate.condition_type))
}

impl StatusInput<'_> {
    pub(crate) fn status(&self) -> PodStatus {
        let spec = self.pod.spec.clone().unwrap_or_default();
        let phase = match self.containers {
            ContainersState::Running { .. } | ContainersState::Crashing => "Running",
            ContainersState::InitCrashing | ContainersState::ImageMissing => "Pending",
            ContainersState::Ended { success: true } => "Succeeded",
            ContainersState::Ended { success: false } => "Failed",
        };
        PodStatus {
            phase: Some(phase.to_owned()),
            conditions: Some(self.conditions()),
            pod_ip: Some(self.pod_ip.to_owned()),
            pod_ips: Some(vec![PodIP { ip: self.pod_ip.to_owned() }]),
            host_ip: Some(self.host_ip.to_owned()),
            host_ips: Some(vec![HostIP { ip: self.host_ip.to_owned() }]),
            start_time: Some(Time(self.started)),
            container_statuses: Some(spec.containers.iter().map(|container| self.container(container)).collect()),
            init_container_statuses: spec
                .init_containers
                .map(|containers| containers.iter().map(|container| self.init_container(container)).collect()),
            ..PodStatus::default()
        }
    }

    /// Only the conditions that a kubelet writes. The API server merges them by type with those of other controllers
    /// (PodScheduled, readiness gates).
    fn conditions(&self) -> Vec<PodCondition> {
        let ended = matches!(self.containers, ContainersState::Ended { .. });
        let containers = self.containers == ContainersState::Running { ready: true };
        [
            ("PodReadyToStartContainers", !ended),
            ("Initialized", self.containers != ContainersState::InitCrashing),
            ("ContainersReady", containers),
            ("Ready", is_ready(self.pod, self.containers)),
        ]
        .into_iter()
        .map(|(type_, status)| PodCondition {
            type_: type_.to_owned(),
            status: if status { "True" } else { "False" }.to_owned(),
            reason: match (status, ended) {
                (true, _) => None,
                (false, true) => Some("PodCompleted".to_owned()),
                (false, false) => Some("ContainersNotReady".to_owned()),
            },
            last_transition_time: Some(Time(self.now)),
            ..PodCondition::default()
        })
        .collect()
    }

    fn container(&self, container: &Container) -> ContainerStatus {
        let (state, ready) = match self.containers {
            ContainersState::Running { ready } => (self.running(), ready),
            ContainersState::Ended { success } => (self.terminated(i32::from(!success)), false),
            ContainersState::Crashing => (crash_loop(), false),
            ContainersState::InitCrashing => return describe(container, waiting("PodInitializing", ""), false, 0),
            ContainersState::ImageMissing => {
                let image = container.image.as_deref().unwrap_or_default();
                let error = format!("rpc error: code = NotFound desc = image {image}: not found");
                return describe(container, waiting("ErrImagePull", &error), false, 0);
            }
        };
        ContainerStatus { last_state: self.last_crash(), ..describe(container, state, ready, self.restarts) }
    }

    fn terminated(&self, code: i32) -> ContainerState {
        ContainerState {
            terminated: Some(ContainerStateTerminated {
                exit_code: code,
                reason: Some(if code == 0 { "Completed" } else { "Error" }.to_owned()),
                message: (code != 0).then(|| CRASH_MESSAGE.to_owned()),
                started_at: Some(Time(self.started)),
                finished_at: Some(Time(self.now)),
                ..ContainerStateTerminated::default()
            }),
            ..ContainerState::default()
        }
    }

    fn last_crash(&self) -> Option<ContainerState> {
        (self.restarts > 0).then(|| self.terminated(1))
    }

    /// A sidecar (`restartPolicy: Always`) runs as long as the pod. Other init containers are completed.
    fn init_container(&self, container: &Container) -> ContainerStatus {
        let sidecar = container.restart_policy.as_deref() == Some("Always");
        let ended = matches!(self.containers, ContainersState::Ended { .. });
        if self.containers == ContainersState::InitCrashing {
            let status = describe(container, crash_loop(), false, self.restarts);
            return ContainerStatus { last_state: self.last_crash(), ..status };
        }
        let state = if sidecar && !ended { self.running() } else { self.terminated(0) };
        describe(container, state, true, 0)
    }

    fn running(&self) -> ContainerState {
        ContainerState {
            running: Some(ContainerStateRunning { started_at: Some(Time(self.started)) }),
            ..ContainerState::default()
        }
    }
}

fn crash_loop() -> ContainerState {
    waiting("CrashLoopBackOff", "back-off restarting failed container")
}

fn waiting(reason: &str, message: &str) -> ContainerState {
    let message = (!message.is_empty()).then(|| message.to_owned());
    ContainerState {
        waiting: Some(ContainerStateWaiting { reason: Some(reason.to_owned()), message }),
        ..ContainerState::default()
    }
}

fn describe(container: &Container, state: ContainerState, ready: bool, restarts: i32) -> ContainerStatus {
    let image = container.image.clone().unwrap_or_default();
    // virt-controller requires a digest of container disks before it allows a VMI to migrate.
    let digest = hex(&Sha256::digest(&image));
    ContainerStatus {
        name: container.name.clone(),
        image_id: format!("{}@sha256:{digest}", image.split(['@', ':']).next().unwrap_or_default()),
        container_id: Some(format!("lab://{}", container.name)),
        image,
        ready,
        started: Some(state.running.is_some()),
        restart_count: restarts,
        state: Some(state),
        ..ContainerStatus::default()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn pod(gate_open: bool) -> Pod {
        let conditions = if gate_open { json!([{"type": "example.org/gate", "status": "True"}]) } else { json!([]) };
        serde_json::from_value(json!({
            "metadata": {"name": "p"},
            "spec": {
                "readinessGates": [{"conditionType": "example.org/gate"}],
                "initContainers": [
                    {"name": "setup", "image": "a"},
                    {"name": "sidecar", "image": "b", "restartPolicy": "Always"},
                ],
                "containers": [{"name": "main", "image": "registry/x:1"}],
            },
            "status": {"conditions": conditions},
        }))
        .unwrap()
    }

    fn status(pod: &Pod, containers: ContainersState) -> PodStatus {
        status_after(0, pod, containers)
    }

    fn status_after(restarts: i32, pod: &Pod, containers: ContainersState) -> PodStatus {
        let now = Timestamp::UNIX_EPOCH;
        StatusInput { pod, containers, restarts, pod_ip: "10.1.2.3", host_ip: "10.1.1.1", started: now, now }.status()
    }

    fn condition(status: &PodStatus, type_: &str) -> String {
        status.conditions.iter().flatten().find(|condition| condition.type_ == type_).unwrap().status.clone()
    }

    #[test]
    fn a_pod_with_a_false_readiness_gate_is_not_ready() {
        let running = ContainersState::Running { ready: true };
        assert_eq!(condition(&status(&pod(false), running), "Ready"), "False");
        assert_eq!(condition(&status(&pod(false), running), "ContainersReady"), "True");
        assert_eq!(condition(&status(&pod(true), running), "Ready"), "True");
    }

    #[test]
    fn sidecars_run_and_init_containers_are_completed() {
        let status = status(&pod(true), ContainersState::Running { ready: true });
        let states: Vec<bool> = status
            .init_container_statuses
            .iter()
            .flatten()
            .map(|container| container.state.as_ref().unwrap().running.is_some())
            .collect();
        assert_eq!(states, [false, true]);
    }

    #[test]
    fn a_crashing_container_waits_in_crash_loop_back_off() {
        let status = status_after(3, &pod(true), ContainersState::Crashing);
        let container = status.container_statuses.unwrap().remove(0);
        assert_eq!(container.restart_count, 3);
        assert_eq!(container.state.unwrap().waiting.unwrap().reason.unwrap(), "CrashLoopBackOff");
        assert_eq!(status.phase.as_deref(), Some("Running"));
    }

    #[test]
    fn the_restart_count_stays_when_a_container_runs_again() {
        for containers in [ContainersState::Running { ready: true }, ContainersState::Ended { success: true }] {
            let container = status_after(3, &pod(true), containers).container_statuses.unwrap().remove(0);
            assert_eq!(container.restart_count, 3);
            assert!(container.last_state.unwrap().terminated.is_some());
        }
    }

    #[test]
    fn an_ended_pod_has_a_final_phase() {
        assert_eq!(status(&pod(true), ContainersState::Ended { success: true }).phase.as_deref(), Some("Succeeded"));
        assert_eq!(status(&pod(true), ContainersState::Ended { success: false }).phase.as_deref(), Some("Failed"));
    }
}
