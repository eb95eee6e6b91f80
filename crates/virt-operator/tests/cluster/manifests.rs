//! What `virt-operator manifests` prints is enough: the pods of its Deployment become ready, and with its own service
//! account the operator may do everything that it tries.

use anyhow::{Result, ensure};
use vitivirt_lab::harness::Suite;
use vitivirt_lab::{Lab, LabOptions, VirtOperator};

use crate::world::{PATIENCE, operator_requests, program};

pub(crate) fn add(suite: &mut Suite) {
    suite.test("its_own_manifests_make_it_ready", |_| async move {
        let lab = Lab::start(LabOptions::default()).await?;
        lab.create_virt_operator(&VirtOperator::ours(program())).await?;
        lab.wait_for_virt_operator(PATIENCE).await?;
        nothing_was_forbidden(&lab)?;
        lab.stop().await
    });
    suite.test("its_own_permissions_suffice_for_an_installation", |labs| async move {
        let lab = labs.ours(&program()).await?;
        nothing_was_forbidden(&lab)
    });
}

fn nothing_was_forbidden(lab: &Lab) -> Result<()> {
    let requests = operator_requests(lab)?;
    ensure!(!requests.is_empty(), "it has asked for nothing");
    let refused: Vec<_> = requests.iter().filter(|record| matches!(record.code, Some(401 | 403))).collect();
    ensure!(refused.is_empty(), "refused: {refused:#?}");
    Ok(())
}
