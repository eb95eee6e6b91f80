//! Why the pod of a VMI does not start, and what to do about it. KubeVirt's VMI shows little of that: the causes are in the
//! events of the pod.

use crate::observed::LauncherProblem;

/// The first row whose reason and text match decides.
const REMEDIES: [(&str, &str, &str); 11] = [
    (
        "FailedAttachVolume",
        "Multi-Attach",
        "the volume is still attached to another node; if that node is lost for good, remove it or taint it with \
         node.kubernetes.io/out-of-service, so that Kubernetes detaches the volume",
    ),
    ("FailedAttachVolume", "", "check the storage driver and `kubectl get volumeattachments`"),
    ("FailedMount", "", "check the storage driver on the node, and that the Secrets and PVCs of the pod exist"),
    ("FailedMapVolume", "", "check the storage driver on the node"),
    (
        "FailedCreatePodSandBox",
        "",
        "check that the bridge of the NetworkConfiguration and the CNI plugins exist on the node, and the logs of Multus",
    ),
    ("NetworkNotReady", "", "the CNI plugin of the node is not ready; check the pods of the cluster network"),
    ("ErrImagePull", "", IMAGE),
    ("ImagePullBackOff", "", IMAGE),
    ("Failed", "image", IMAGE),
    ("BackOff", "image", IMAGE),
    ("FailedScheduling", "", "add nodes, remove taints, free up resources or request fewer resources"),
];
const IMAGE: &str = "correct the image of the disk or KubeVirt's imageRegistry, or the credentials of the registry";

pub(super) fn message(namespace: &str, machine: &str, problem: &LauncherProblem) -> String {
    let LauncherProblem { reason, message } = problem;
    let matches = |(known, text, _): &&(&str, &str, &str)| reason == known && message.contains(text);
    let remedy = REMEDIES.iter().find(matches).map_or("see the events of the pod", |(_, _, remedy)| remedy);
    format!(
        "Pod of the machine does not start: {reason}: {message}; {remedy}; see `kubectl -n {namespace} describe pod -l \
         vm.kubevirt.io/name={machine}`"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_cause_has_its_remedy() {
        for (reason, text, part) in [
            ("FailedAttachVolume", "Multi-Attach error for volume \"pvc-1\"", "out-of-service"),
            ("FailedAttachVolume", "rpc error", "volumeattachments"),
            ("FailedMount", "MountVolume.SetUp failed", "storage driver on the node"),
            ("FailedCreatePodSandBox", "plugin type=\"bridge\" failed", "bridge of the NetworkConfiguration"),
            ("Failed", "Failed to pull image \"x\"", "registry"),
            ("FailedScheduling", "1 node(s) had untolerated taint", "remove taints"),
            ("Unheard", "of", "see the events"),
        ] {
            let problem = LauncherProblem { reason: reason.to_owned(), message: text.to_owned() };
            let message = message("default", "web", &problem);
            assert!(message.contains(text) && message.contains(part), "{message}");
        }
    }
}
