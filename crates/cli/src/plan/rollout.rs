//! What a change does to pods and VMs that run, and what would stop it. Only plans of installations have this part.

use serde::Serialize;
use vitivirt_api::Target;

use super::ObjectIdentity;

#[derive(Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PlannedRollout {
    /// The version that is installed, and the version that the plan installs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub from_version: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub to_version: Option<String>,
    /// The number of objects that are up to date.
    pub unchanged: usize,
    pub kept: Vec<KeptObject>,
    pub preparations: Vec<String>,
    pub restarts: Vec<PlannedRestart>,
    pub vms: Vec<PlannedVm>,
    pub blockers: Vec<String>,
}

/// An object that the plan would delete if there were not this reason.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct KeptObject {
    #[serde(flatten)]
    identity: ObjectIdentity,
    reason: String,
}

/// The pods of one workload that are replaced.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct PlannedRestart {
    #[serde(flatten)]
    pub(super) identity: ObjectIdentity,
    pub(super) pods: Vec<String>,
    /// The numbers of nodes whose pods are replaced at the same time. Empty for a workload without a pod on each node.
    pub(super) batches: Vec<usize>,
}

#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct PlannedVm {
    #[serde(flatten)]
    pub(super) identity: ObjectIdentity,
    pub(super) effect: VmEffect,
    pub(super) reason: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum VmEffect {
    Migrate,
    Evict,
    /// Nothing happens to the VM, and it stays on the earlier version.
    StayOutdated,
}

impl KeptObject {
    pub fn new(target: &Target, reason: impl Into<String>) -> Self {
        Self { identity: target.into(), reason: reason.into() }
    }

    pub(super) fn line(&self) -> String {
        format!("{}: {}", self.identity, self.reason)
    }
}

impl PlannedRestart {
    pub fn new(target: &Target, pods: Vec<String>, batches: Vec<usize>) -> Self {
        Self { identity: target.into(), pods, batches }
    }
}

impl PlannedVm {
    pub fn new(target: &Target, effect: VmEffect, reason: impl Into<String>) -> Self {
        Self { identity: target.into(), effect, reason: reason.into() }
    }
}
