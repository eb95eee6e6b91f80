//! What a cluster refuses, provoked for real: each refusal is explained, nothing of others is touched, and it heals.

use std::time::Duration;

use anyhow::{Context, ensure};
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod, ResourceQuota, Secret};
use k8s_openapi::api::events::v1::Event;
use kube::api::ListParams;
use serde_json::{Value, json};
use vitivirt_lab::harness::Suite;

use crate::world::{World, diagnosis, machine};

const HEALED: Duration = Duration::from_secs(90);

pub(crate) fn add(suite: &mut Suite) {
    suite.test("a_machine_that_is_too_big_says_so_and_heals", |labs| async move {
        let world = Box::pin(World::begin(&labs, "too-big")).await?;
        let big = json!({"template": "small", "resources": {"memory": {"size": "4000Gi"}}});
        world.create_json(&machine("big", &big)).await?;
        let refused = world.expect("big", "InsufficientResources").await?;
        ensure!(diagnosis(&refused).contains("request less"), "{:?}", refused.status);
        world.counts_errors(&["InsufficientResources"]).await?;
        world.edit("big", &json!({"resources": {"memory": {"size": "1Gi"}}})).await?;
        world.running("big", HEALED).await.map(|_| ())
    });

    suite.test("a_machine_type_that_kubevirt_refuses_names_the_setting", |labs| async move {
        let world = Box::pin(World::begin(&labs, "machine-type")).await?;
        let old = json!({"template": "small", "domain": {"machine": {"type": "pc-i440fx"}}});
        world.create_json(&machine("old", &old)).await?;
        let refused = world.expect("old", "KubeVirtApiError").await?;
        ensure!(diagnosis(&refused).contains("emulatedMachines"), "{:?}", refused.status);
        world.counts_errors(&["KubeVirtApiError"]).await?;
        world.edit("old", &json!({"domain": {"machine": {"type": "pc-q35"}}})).await?;
        world.running("old", HEALED).await.map(|_| ())
    });

    suite.test("a_quota_is_named_and_heals", |labs| async move {
        let world = Box::pin(World::begin(&labs, "quota")).await?;
        let quota = json!({
            "apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "tight"},
            "spec": {"hard": {"persistentvolumeclaims": "0"}},
        });
        world.create_json(&quota).await?;
        let quotas = world.api::<ResourceQuota>();
        let in_force = |quota: Option<&ResourceQuota>| {
            quota.is_some_and(|quota| quota.status.as_ref().is_some_and(|status| status.hard.is_some()))
        };
        world.lab.wait("a quota in force", HEALED, quotas.clone(), "tight", in_force).await?;
        world.create_json(&machine("many", &json!({"template": "small"}))).await?;
        let refused = world.expect("many", "QuotaExceeded").await?;
        ensure!(diagnosis(&refused).contains("exceeded quota"), "{:?}", refused.status);
        world.counts_errors(&["QuotaExceeded"]).await?;
        quotas.delete("tight", &Default::default()).await?;
        world.running("many", HEALED).await.map(|_| ())
    });

    suite.test("foreign_claims_and_secrets_are_left_alone", |labs| async move {
        let world = Box::pin(World::begin(&labs, "foreign-children")).await?;
        let pvc = json!({
            "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "a-root"},
            "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}},
        });
        let secret = json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "b-cloudinit"}, "stringData": {"mine": "yes"}});
        world.create_json(&pvc).await?;
        world.create_json(&secret).await?;
        world.create_json(&machine("a", &json!({"template": "small"}))).await?;
        world.create_json(&machine("b", &json!({"template": "small", "cloudInit": {"userData": "#cloud-config\n"}}))).await?;
        for name in ["a", "b"] {
            let refused = world.expect(name, "NameTaken").await?;
            ensure!(diagnosis(&refused).contains("does not change it"), "{:?}", refused.status);
            world.edit(name, &json!({"resources": {"cpu": {"cores": 2}}})).await?;
            world.delete(name).await?;
        }
        let pvc = world.api::<PersistentVolumeClaim>().get("a-root").await?;
        ensure!(pvc.metadata.labels.is_none() && pvc.metadata.deletion_timestamp.is_none(), "{pvc:?}");
        let secret = world.api::<Secret>().get("b-cloudinit").await?;
        ensure!(secret.metadata.labels.is_none() && secret.data.is_some_and(|data| data.len() == 1), "it was written to");
        Ok(())
    });

    suite.test("user_data_is_nowhere_but_in_its_secret", |labs| async move {
        const CANARY: &str = "canary-7f3a9";
        let world = Box::pin(World::begin(&labs, "canary")).await?;
        let spec =
            json!({"template": "small", "cloudInit": {"userData": format!("#cloud-config\npassword: {CANARY}\n")}});
        world.create_json(&machine("singer", &spec)).await?;
        let machine = world.running("singer", HEALED).await?;
        let secret = world.api::<Secret>().get("singer-cloudinit").await?;
        let data = secret.data.context("the Secret has data")?;
        ensure!(data.values().any(|value| String::from_utf8_lossy(&value.0).contains(CANARY)), "it is in the Secret");
        let all = ListParams::default();
        let (_, metrics) = world.program.get(8080, "/metrics").await?;
        let elsewhere: Vec<(&str, Value)> = vec![
            ("status", json!(machine.status)),
            ("VirtualMachines", json!(world.vms().list(&all).await?.items)),
            ("instances", json!(world.vmis().list(&all).await?.items)),
            ("claims", json!(world.api::<PersistentVolumeClaim>().list(&all).await?.items)),
            ("pods", json!(world.api::<Pod>().list(&all).await?.items)),
            ("events", json!(world.api::<Event>().list(&all).await?.items)),
            ("metrics", json!(metrics)),
            ("the log", json!(world.program.log_text())),
        ];
        for (place, text) in elsewhere {
            ensure!(!text.to_string().contains(CANARY), "user data is in {place}");
        }
        Ok(())
    });
}
