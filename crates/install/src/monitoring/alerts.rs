//! The texts of alerts: this project has its own. The expressions are data of the release.

pub(super) struct AlertText {
    pub(super) summary: &'static str,
    pub(super) description: Option<&'static str>,
}

/// The summary of an alert without a text is empty. A test makes sure that every alert of the release has a text.
pub(super) fn alert_text(alert: &str, severity: &str) -> AlertText {
    let (summary, description) = match (alert, severity) {
        ("GuestFilesystemAlmostOutOfSpace", "critical") => (
            "A filesystem in a virtual machine is nearly full",
            Some(
                "The filesystem {{ $labels.disk_name }} of {{ $labels.namespace }}/{{ $labels.name }} is nearly full; \
                 programs in the guest will soon fail to write.",
            ),
        ),
        ("GuestFilesystemAlmostOutOfSpace", _) => (
            "A filesystem in a virtual machine is filling up",
            Some("The filesystem {{ $labels.disk_name }} of {{ $labels.namespace }}/{{ $labels.name }} is filling up."),
        ),
        ("GuestVCPUQueueHighCritical", _) => (
            "More than 20 tasks are waiting for a CPU in a virtual machine",
            Some("The guest of {{ $labels.name }} has far more runnable tasks than virtual CPUs."),
        ),
        ("GuestVCPUQueueHighWarning", _) => (
            "More than 10 tasks are waiting for a CPU in a virtual machine",
            Some("The guest of {{ $labels.name }} has more runnable tasks than virtual CPUs."),
        ),
        ("KubeVirtDeprecatedAPIRequested", _) => (
            "{{ $value }} requests to a deprecated KubeVirt API in the last 10 minutes",
            Some(
                "A client still uses {{ $labels.resource }}.{{ $labels.group }}/{{ $labels.version }}, which a later \
                 release will not serve.",
            ),
        ),
        ("KubeVirtNoAvailableNodesToRunVMs", _) => ("No node in the cluster can run virtual machines", None),
        ("KubeVirtVMGuestMemoryAvailableLow", _) => (
            "A virtual machine without swap is almost out of memory",
            Some("{{ $labels.namespace }}/{{ $labels.vm }} has less than 3% of its memory available and no swap."),
        ),
        ("KubeVirtVMGuestMemoryPressure", _) => (
            "A virtual machine is short of memory and may be thrashing",
            Some("{{ $labels.namespace }}/{{ $labels.vm }} has little usable memory and reads pages back from disk."),
        ),
        ("KubeVirtVMIExcessiveMigrations", _) => (
            "A virtual machine has been migrated unusually often in the last 24 hours",
            Some("{{ $labels.namespace }}/{{ $labels.vmi }} keeps moving between nodes."),
        ),
        ("LowKVMNodesCount", _) => (
            "Fewer than two nodes provide KVM, so virtual machines cannot be live-migrated",
            Some("Live migration needs a second node with hardware virtualization."),
        ),
        ("LowReadyVirtAPICount", _) => ("Not all running virt-api pods are ready", None),
        ("LowReadyVirtControllersCount", _) => ("Not all running virt-controller pods are ready", None),
        ("LowReadyVirtHandlerCount", _) => ("Not all running virt-handler pods are ready", None),
        ("LowReadyVirtOperatorsCount", _) => ("Not all running virt-operator pods are ready", None),
        ("LowVirtAPICount", _) => ("Fewer than three quarters of the desired virt-api pods are running", None),
        ("LowVirtControllersCount", _) => {
            ("Fewer than three quarters of the desired virt-controller pods are running", None)
        }
        ("LowVirtOperatorCount", _) => {
            ("Fewer than three quarters of the desired virt-operator pods are running", None)
        }
        ("NoLeadingVirtOperator", _) => ("No virt-operator pod has been the leader for 10 minutes", None),
        ("NoReadyVirtAPI", _) => ("No virt-api pod has been ready for 10 minutes", None),
        ("NoReadyVirtController", _) => ("No virt-controller pod has been ready for 10 minutes", None),
        ("NoReadyVirtHandler", _) => ("No virt-handler pod has been ready for 10 minutes", None),
        ("NoReadyVirtOperator", _) => ("No virt-operator pod has been ready for 10 minutes", None),
        ("OrphanedVirtualMachineInstances", _) => (
            "Node {{ $labels.node }} runs virtual machines, and its virt-handler has not been ready for 10 minutes",
            None,
        ),
        ("OutdatedVirtualMachineInstanceWorkloads", _) => {
            ("Virtual machines still run in pods of an earlier KubeVirt release", None)
        }
        ("VMCannotBeEvicted", _) => (
            "A virtual machine cannot be migrated off a draining node",
            Some(
                "{{ $labels.namespace }}/{{ $labels.name }} on node {{ $labels.node }} has the eviction strategy \
                 LiveMigrate, but cannot be migrated.",
            ),
        ),
        ("VirtAPIDown", _) => ("No virt-api pod has been running for 10 minutes", None),
        ("VirtApiRESTErrorsBurst", _) => {
            ("At least 80% of the requests sent by virt-api failed in the last 5 minutes", None)
        }
        ("VirtControllerDown", _) => ("No virt-controller pod has been running for 10 minutes", None),
        ("VirtControllerRESTErrorsBurst", _) => {
            ("At least 80% of the requests sent by virt-controller failed in the last 5 minutes", None)
        }
        ("VirtHandlerDaemonSetRolloutFailing", _) => {
            ("virt-handler is not ready on every node where it should run", None)
        }
        ("VirtHandlerDown", _) => ("No virt-handler pod has been running for 10 minutes", None),
        ("VirtHandlerRESTErrorsBurst", _) => {
            ("At least 80% of the requests sent by virt-handler failed in the last 5 minutes", None)
        }
        ("VirtLauncherPodsStuckFailed", _) => ("At least 200 failed virt-launcher pods have not been deleted", None),
        ("VirtOperatorDown", _) => ("No virt-operator pod has been running for 10 minutes", None),
        ("VirtOperatorRESTErrorsBurst", _) => {
            ("At least 80% of the requests sent by virt-operator failed in the last 5 minutes", None)
        }
        ("VirtualMachineInstanceHasEphemeralHotplugVolume", _) => (
            "A virtual machine has a hotplugged volume that is not in its spec",
            Some(
                "Volume {{ $labels.volume_name }} of {{ $labels.namespace }}/{{ $labels.name }} is detached when the \
                 virtual machine stops, and a later release will unplug such volumes automatically; add it to the \
                 VirtualMachine.",
            ),
        ),
        ("VirtualMachineStuckInUnhealthyState", _) => (
            "A virtual machine has been {{ $labels.status }} for more than 10 minutes",
            Some("{{ $labels.namespace }}/{{ $labels.name }} remains in state {{ $labels.status }}."),
        ),
        ("VirtualMachineStuckOnNode", _) => (
            "A virtual machine has been unhealthy on its node for more than 5 minutes",
            Some(
                "{{ $labels.namespace }}/{{ $labels.name }} on node {{ $labels.node }} remains in state {{ \
                 $labels.status }}.",
            ),
        ),
        _ => ("", None),
    };
    AlertText { summary, description }
}
