//! The output of `virt-operator manifests` is sufficient: the pods of its Deployment become ready, and its service
//! account has every permission that the operator needs.

use std::sync::Arc;

use anyhow::{Result, ensure};
use vitivirt_lab::{
    Lab, LabOptions, VirtOperator,
    harness::{SharedLabs, Suite},
};

use crate::support::{TIMEOUT, operator_requests, program};

pub(crate) fn add(suite: &mut Suite) {
    suite.test("the_printed_manifests_start_a_ready_operator", the_printed_manifests_start_a_ready_operator);
    suite.test("the_printed_permissions_suffice_to_install", the_printed_permissions_suffice_to_install);
}

async fn the_printed_manifests_start_a_ready_operator(_: Arc<SharedLabs>) -> Result<()> {
    let lab = Lab::start(LabOptions::default()).await?;
    lab.create_virt_operator(&VirtOperator::ours(program())).await?;
    lab.wait_for_virt_operator(TIMEOUT).await?;
    ensure_no_request_was_forbidden(&lab)?;
    lab.stop().await
}

async fn the_printed_permissions_suffice_to_install(labs: Arc<SharedLabs>) -> Result<()> {
    let lab = labs.ours(&program()).await?;
    ensure_no_request_was_forbidden(&lab)
}

fn ensure_no_request_was_forbidden(lab: &Lab) -> Result<()> {
    let requests = operator_requests(lab)?;
    ensure!(!requests.is_empty(), "the operator sent no requests");
    let forbidden: Vec<_> = requests.iter().filter(|record| matches!(record.code, Some(401 | 403))).collect();
    ensure!(forbidden.is_empty(), "forbidden: {forbidden:#?}");
    Ok(())
}
