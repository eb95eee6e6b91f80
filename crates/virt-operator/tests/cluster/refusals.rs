//! Words that clients of upstream virt-operator search for in the refusals of its webhooks.

use std::sync::Arc;

use anyhow::{Result, bail, ensure};
use kube::api::{Patch, PatchParams, PostParams};
use serde_json::{Value, json};
use vitivirt_lab::harness::{SharedLabs, Suite};

use crate::support::{kubevirt, kubevirts, program, wait_until_available};

pub(crate) fn add(suite: &mut Suite) {
    vitivirt_lab::tests!(suite; refusals_contain_the_words_of_upstream_virt_operator);
}

async fn refusals_contain_the_words_of_upstream_virt_operator(labs: Arc<SharedLabs>) -> Result<()> {
    let lab = labs.ours(&program()).await?;
    wait_until_available(&lab).await?;
    let api = kubevirts(&lab);
    let mut second = kubevirt(&json!({}));
    second["metadata"]["name"] = json!("second");
    match api.create(&PostParams::default(), &serde_json::from_value(second)?).await {
        Ok(_) => bail!("a second KubeVirt resource was created"),
        Err(error) => ensure!(error.to_string().contains("Kubevirt is already created"), "{error}"),
    }
    let toleration = json!([{"key": "a", "operator": "foo", "value": "b"}]);
    let placement = |component: &str| json!({component: {"nodePlacement": {"tolerations": toleration}}});
    let refused: [(Value, &str); 3] = [
        (json!({"infra": {"replicas": 0}}), "infra replica count can't be 0"),
        (placement("infra"), "spec.infra.nodePlacement.tolerations.operator in body should be one of"),
        (placement("workloads"), "spec.workloads.nodePlacement.tolerations.operator in body should be one of"),
    ];
    for (spec, words) in refused {
        let patch = Patch::Merge(json!({"spec": spec}));
        match api.patch("kubevirt", &PatchParams::default(), &patch).await {
            Ok(_) => bail!("{spec} was accepted"),
            Err(error) => ensure!(error.to_string().contains(words), "{words:?} is not in {error}"),
        }
    }
    Ok(())
}
