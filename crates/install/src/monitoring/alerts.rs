//! The texts of alerts.

pub(super) struct AlertText {
    pub(super) summary: &'static str,
    pub(super) description: Option<&'static str>,
}

/// A test makes sure that every alert has a text; without one, its name is the summary.
pub(super) fn text(alert: &str, severity: &str) -> AlertText {
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
            "More than 20 tasks wait for a CPU in a virtual machine",
            Some("The guest of {{ $labels.name }} has far more work than virtual CPUs."),
        ),
        ("GuestVCPUQueueHighWarning", _) => (
            "More than 10 tasks wait for a CPU in a virtual machine",
            Some("The guest of {{ $labels.name }} has more work than virtual CPUs."),
        ),
        ("KubeVirtDeprecatedAPIRequested", _) => (
            "{{ $value }} requests to a deprecated KubeVirt API in the last 10 minutes",
            Some(
                "A client still uses {{ $labels.resource }}.{{ $labels.group }}/{{ $labels.version }}, which a later \
                 release will not serve.",
            ),
        ),
        ("KubeVirtNoAvailableNodesToRunVMs", _) => ("No node of the cluster can run virtual machines", None),
        ("KubeVirtVMGuestMemoryAvailableLow", _) => (
            "A virtual machine without swap has hardly any memory left",
            Some("{{ $labels.namespace }}/{{ $labels.vm }} has less than 3 % of its memory available and no swap."),
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
            "Fewer than two nodes offer KVM, so nothing can be migrated",
            Some("Live migration needs a second node with hardware virtualization."),
        ),
        ("LowReadyVirtAPICount", _) => ("Not every running virt-api is ready", None),
        ("LowReadyVirtControllersCount", _) => ("Not every running virt-controller is ready", None),
        ("LowReadyVirtHandlerCount", _) => ("Not every running virt-handler is ready", None),
        ("LowReadyVirtOperatorsCount", _) => ("Not every running virt-operator is ready", None),
        ("LowVirtAPICount", _) => ("Fewer than three quarters of the desired virt-api pods are running", None),
        ("LowVirtControllersCount", _) => {
            ("Fewer than three quarters of the desired virt-controller pods are running", None)
        }
        ("LowVirtOperatorCount", _) => {
            ("Fewer than three quarters of the desired virt-operator pods are running", None)
        }
        ("NoLeadingVirtOperator", _) => ("For 10 minutes no virt-operator has held the lease", None),
        ("NoReadyVirtAPI", _) => ("For 10 minutes no virt-api has been ready", None),
        ("NoReadyVirtController", _) => ("For 10 minutes no virt-controller has been ready", None),
        ("NoReadyVirtHandler", _) => ("For 10 minutes no virt-handler has been ready", None),
        ("NoReadyVirtOperator", _) => ("For 10 minutes no virt-operator has been ready", None),
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
        ("VirtAPIDown", _) => ("For 10 minutes no virt-api has run", None),
        ("VirtApiRESTErrorsBurst", _) => ("Four out of five requests of virt-api failed in the last 5 minutes", None),
        ("VirtControllerDown", _) => ("For 10 minutes no virt-controller has run", None),
        ("VirtControllerRESTErrorsBurst", _) => {
            ("Four out of five requests of virt-controller failed in the last 5 minutes", None)
        }
        ("VirtHandlerDaemonSetRolloutFailing", _) => {
            ("virt-handler is not ready on every node that it should run on", None)
        }
        ("VirtHandlerDown", _) => ("For 10 minutes no virt-handler has run", None),
        ("VirtHandlerRESTErrorsBurst", _) => {
            ("Four out of five requests of virt-handler failed in the last 5 minutes", None)
        }
        ("VirtLauncherPodsStuckFailed", _) => ("At least 200 failed virt-launcher pods are left over", None),
        ("VirtOperatorDown", _) => ("For 10 minutes no virt-operator has run", None),
        ("VirtOperatorRESTErrorsBurst", _) => {
            ("Four out of five requests of virt-operator failed in the last 5 minutes", None)
        }
        ("VirtualMachineInstanceHasEphemeralHotplugVolume", _) => (
            "A virtual machine has a hotplugged volume that is not in its specification",
            Some(
                "Volume {{ $labels.volume_name }} of {{ $labels.namespace }}/{{ $labels.name }} is lost after the next \
                 stop, and a later release unplugs such volumes automatically; add it to the VirtualMachine.",
            ),
        ),
        ("VirtualMachineStuckInUnhealthyState", _) => (
            "A virtual machine has been {{ $labels.status }} for more than 10 minutes",
            Some("{{ $labels.namespace }}/{{ $labels.name }} stays in the state {{ $labels.status }}."),
        ),
        ("VirtualMachineStuckOnNode", _) => (
            "A virtual machine on a node has not become healthy for more than 5 minutes",
            Some(
                "{{ $labels.namespace }}/{{ $labels.name }} on node {{ $labels.node }} stays in the state \
                 {{ $labels.status }}.",
            ),
        ),
        _ => ("", None),
    };
    AlertText { summary, description }
}
