//! Tenants that share a cluster: what a namespace's users and the operator's own account can do.

use std::{sync::Arc, time::Duration};

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::{Namespace, PersistentVolumeClaim, Secret};
use kube::{
    Api, Client, Config,
    api::{DeleteParams, Patch, PatchParams, PostParams},
    config::{KubeConfigOptions, Kubeconfig},
};
use kubevirt_operator::{policies, rbac};
use serde_json::{Value, json};
use vitivirt_api::machine::{ANNOTATION_ADOPT, ANNOTATION_ADOPT_BY, LABEL_MANAGED_BY, Machine, NetworkConfiguration};
use vitivirt_lab::{
    Extension, KubeVirtInstaller, Lab, LabOptions,
    harness::{SharedLabs, Suite},
    manifests,
    proxy::{Match, ProxyFault, ProxyRule, RequestVerb},
};

use crate::{
    machine_test::{
        MACHINE_PATIENCE, MachineTest, check_diagnosis, create_crds, foreign_vm, in_namespace, is_observed, machine,
        operator_user, phase, ready_reason,
    },
    poll::poll_until,
    replica::{ACCOUNT, start_leader},
};

pub(crate) fn add(suite: &mut Suite) {
    vitivirt_lab::tests!(suite;
        a_namespace_admin_can_write_machines_and_no_networks,
        the_allow_list_limits_the_bridges_and_vlans_of_a_namespace,
        the_operators_account_can_change_only_objects_of_machines,
        two_namespaces_on_one_vlan_do_not_share_a_mac_address,
        a_slow_namespace_a_busy_server_and_a_flood_do_not_stop_the_others,
    );
}

/// A client that sends requests as another user.
async fn client_as(lab: &Lab, user: &str) -> Result<Client> {
    let kubeconfig = Kubeconfig::read_from(lab.kubeconfig())?;
    let mut config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?;
    config.auth_info.impersonate = Some(user.to_owned());
    Ok(Client::try_from(config)?)
}

fn network(name: &str, spec: &Value) -> Result<NetworkConfiguration> {
    let network = json!({
        "apiVersion": "vitistack.io/v1alpha1", "kind": "NetworkConfiguration", "metadata": {"name": name}, "spec": spec,
    });
    Ok(serde_json::from_value(network)?)
}

fn bind(role: &str, user: &str, namespace: &str) -> Value {
    let group = "rbac.authorization.k8s.io";
    json!({
        "apiVersion": format!("{group}/v1"), "kind": "RoleBinding",
        "metadata": {"name": format!("{user}-{role}"), "namespace": namespace},
        "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": role},
        "subjects": [{"kind": "User", "apiGroup": group, "name": user}],
    })
}

async fn create_namespace(lab: &Lab, name: &str) -> Result<()> {
    let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}});
    manifests::create(&lab.client(), &[namespace]).await
}

fn is_forbidden<T>(result: &kube::Result<T>) -> bool {
    matches!(result, Err(kube::Error::Api(status)) if status.code == 403)
}

/// Fails unless the server refused the request with this text.
fn check_refused<T: std::fmt::Debug>(result: kube::Result<T>, what: &str, text: &str) -> Result<()> {
    match result {
        Err(kube::Error::Api(status)) if status.message.contains(text) => Ok(()),
        other => anyhow::bail!("{what}: {text:?} expected, got {other:?}"),
    }
}

/// Kubernetes' role `admin` is what a tenant has in its own namespace.
async fn a_namespace_admin_can_write_machines_and_no_networks(labs: Arc<SharedLabs>) -> Result<()> {
    let lab = labs.plain().await?;
    let namespace = "tenant-admin";
    create_crds(&lab).await?;
    create_namespace(&lab, namespace).await?;
    let mut objects: Vec<Value> = rbac::user_roles().iter().map(|role| json!(role)).collect();
    objects.push(bind("admin", "tenant", namespace));
    objects.push(bind(rbac::NETWORK_ROLE, "network-administrator", namespace));
    manifests::create(&lab.client(), &objects).await?;

    let tenant = client_as(&lab, "tenant").await?;
    let machines: Api<Machine> = Api::namespaced(tenant.clone(), namespace);
    let web: Machine = serde_json::from_value(machine("web", &json!({"template": "small"})))?;
    // The controller manager aggregates the roles after a while.
    let is_created = || async { Ok(machines.create(&PostParams::default(), &web).await.is_ok()) };
    poll_until(MACHINE_PATIENCE, is_created, || "the namespace's admin can create a Machine".to_owned()).await?;
    let networks: Api<NetworkConfiguration> = Api::namespaced(tenant, namespace);
    let prod = network("prod", &json!({"bridge": "br1", "vlan": 100}))?;
    ensure!(is_forbidden(&networks.create(&PostParams::default(), &prod).await), "a tenant chose a VLAN of the nodes");
    networks.list(&kube::api::ListParams::default()).await.context("a tenant can read networks")?;

    let administrator: Api<NetworkConfiguration> =
        Api::namespaced(client_as(&lab, "network-administrator").await?, namespace);
    administrator.create(&PostParams::default(), &prod).await?;
    let change = Patch::Merge(json!({"spec": {"vlan": 101}}));
    let changed = networks.patch("prod", &PatchParams::default(), &change).await;
    ensure!(is_forbidden(&changed), "a tenant changed a VLAN");
    Ok(())
}

async fn the_allow_list_limits_the_bridges_and_vlans_of_a_namespace(labs: Arc<SharedLabs>) -> Result<()> {
    let lab = labs.plain().await?;
    create_crds(&lab).await?;
    let namespace = "allow-list";
    create_namespace(&lab, namespace).await?;
    // Other tests on this lab write networks, so the policy applies to one namespace here.
    let mut binding = json!(policies::binding(policies::ALLOWED_NETWORKS));
    if let Some(Value::Object(spec)) = binding.get_mut("spec") {
        let selector = json!({"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}}});
        spec.insert("matchResources".to_owned(), selector);
    }
    manifests::create(&lab.client(), &[json!(policies::allowed_networks()), binding]).await?;
    let networks: Api<NetworkConfiguration> = Api::namespaced(lab.client(), namespace);
    let create = async |name: &str, spec: Value| {
        let network = network(name, &spec)?;
        anyhow::Ok(networks.create(&PostParams::default(), &network).await)
    };
    // The API server applies a new policy after a while.
    let probe = network("probe", &json!({"bridge": "br1", "vlan": 1}))?;
    let dry_run = PostParams { dry_run: true, ..PostParams::default() };
    let is_applied = || async { Ok(is_forbidden(&networks.create(&dry_run, &probe).await)) };
    poll_until(MACHINE_PATIENCE, is_applied, || "the policy refuses a network".to_owned()).await?;

    let allow = async |list: &str| {
        let annotated = json!({"metadata": {"annotations": {policies::ANNOTATION_ALLOWED_NETWORKS: list}}});
        let namespaces: Api<Namespace> = Api::all(lab.client());
        namespaces.patch(namespace, &PatchParams::default(), &Patch::Merge(annotated)).await?;
        anyhow::Ok(())
    };
    allow("br1/100-199, br2, br3/*, br4/7").await?;
    let first = network("first", &json!({"bridge": "br1", "vlan": 100}))?;
    let is_created = || async { Ok(networks.create(&PostParams::default(), &first).await.is_ok()) };
    poll_until(MACHINE_PATIENCE, is_created, || "an allowed network can be created".to_owned()).await?;
    for (index, spec) in [
        json!({"bridge": "br1", "vlan": 199}),
        json!({"bridge": "br2"}),
        json!({"bridge": "br3"}),
        json!({"bridge": "br3", "vlan": 5}),
        json!({"bridge": "br4", "vlan": 7}),
    ]
    .into_iter()
    .enumerate()
    {
        create(&format!("allowed-{index}"), spec.clone()).await?.with_context(|| spec.to_string())?;
    }
    for spec in [
        json!({"bridge": "br1", "vlan": 200}),
        json!({"bridge": "br1"}),
        json!({"bridge": "br2", "vlan": 1}),
        json!({"bridge": "br4", "vlan": 71}),
        json!({"bridge": "br"}),
    ] {
        let refused = create("refused", spec.clone()).await?;
        check_refused(refused, &spec.to_string(), policies::ANNOTATION_ALLOWED_NETWORKS)?;
    }
    let change = Patch::Merge(json!({"spec": {"vlan": 99}}));
    check_refused(networks.patch("first", &PatchParams::default(), &change).await, "a change", "br1/99")?;
    // A network that is no longer allowed can still be labelled, and its finalizer can be removed.
    allow("br9").await?;
    let label = Patch::Merge(json!({"metadata": {"labels": {"a": "b"}}}));
    networks.patch("first", &PatchParams::default(), &label).await?;
    Ok(())
}

async fn the_operators_account_can_change_only_objects_of_machines(labs: Arc<SharedLabs>) -> Result<()> {
    let namespace = "own-objects";
    let test = Box::pin(MachineTest::start(&labs, namespace)).await?;
    let policy = format!("{}-{namespace}", policies::OWN_OBJECTS);
    let objects = [json!(policies::own_objects(&policy, namespace, ACCOUNT)), json!(policies::binding(&policy))];
    manifests::create(&test.lab.client(), &objects).await?;
    // Objects of the tenant.
    test.create_secret("password", "k", "canary").await?;
    test.create_json(&foreign_vm("theirs")).await?;
    let disk = json!({
        "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "disk"},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}},
    });
    test.create_json(&disk).await?;

    let operator = client_as(&test.lab, &operator_user(namespace)).await?;
    let secrets: Api<Secret> = Api::namespaced(operator.clone(), namespace);
    let steal: Secret = serde_json::from_value(json!({"metadata": {"name": "new"}, "stringData": {"a": "b"}}))?;
    let dry_run = PostParams { dry_run: true, ..PostParams::default() };
    let is_applied = || async { Ok(is_forbidden(&secrets.create(&dry_run, &steal).await)) };
    poll_until(MACHINE_PATIENCE, is_applied, || "the policy refuses a Secret without the label".to_owned()).await?;
    // The token controller fills such a Secret with a token of any ServiceAccount.
    let token: Secret = serde_json::from_value(json!({
        "metadata": {
            "name": "token", "labels": {LABEL_MANAGED_BY: "kubevirt-operator"},
            "annotations": {"kubernetes.io/service-account.name": "default"},
        },
        "type": "kubernetes.io/service-account-token",
    }))?;
    check_refused(secrets.create(&dry_run, &token).await, "token of a ServiceAccount", "type Opaque")?;
    let (delete, merge) = (DeleteParams::default(), PatchParams::default());
    let by_policy = "belong to a Machine";
    check_refused(secrets.delete("password", &delete).await, "delete of a Secret", by_policy)?;
    let data = Patch::Merge(json!({"stringData": {"k": "other"}}));
    check_refused(secrets.patch("password", &merge, &data).await, "change of a Secret", by_policy)?;
    let mark = json!({"metadata": {"labels": {LABEL_MANAGED_BY: "kubevirt-operator"}}});
    check_refused(secrets.patch("password", &merge, &Patch::Merge(mark.clone())).await, "mark of a Secret", by_policy)?;
    let vms = Api::namespaced_with(operator.clone(), namespace, &vitivirt_api::resources::virtual_machine_resource());
    let vms: Api<kube::api::DynamicObject> = vms;
    check_refused(vms.delete("theirs", &delete).await, "delete of a VM", by_policy)?;
    let start = Patch::Merge(json!({"spec": {"runStrategy": "Always"}}));
    check_refused(vms.patch("theirs", &merge, &start).await, "start of a VM", by_policy)?;
    check_refused(vms.patch("theirs", &merge, &Patch::Merge(mark)).await, "mark of a VM", by_policy)?;
    let pvcs: Api<PersistentVolumeClaim> = Api::namespaced(operator.clone(), namespace);
    check_refused(pvcs.delete("disk", &delete).await, "delete of a PVC", by_policy)?;
    let grow = Patch::Merge(json!({"spec": {"resources": {"requests": {"storage": "2Gi"}}}}));
    check_refused(pvcs.patch("disk", &merge, &grow).await, "change of a PVC", by_policy)?;

    // Nor can the account mark it, and delete it afterwards.
    let mark = Patch::Merge(json!({"metadata": {"labels": {LABEL_MANAGED_BY: "kubevirt-operator"}}}));
    check_refused(pvcs.patch("disk", &merge, &mark).await, "mark of a PVC", by_policy)?;
    let consent = Patch::Merge(json!({"metadata": {"annotations": {ANNOTATION_ADOPT_BY: "web"}}}));
    check_refused(pvcs.patch("disk", &merge, &consent).await, "consent for a PVC", by_policy)?;

    // A PVC and a Secret of the tenant are adopted with the tenant's consent.
    let adopted = json!({
        "apiVersion": "v1", "kind": "PersistentVolumeClaim",
        "metadata": {"name": "own-root", "annotations": {ANNOTATION_ADOPT_BY: "own"}},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "20Gi"}}},
    });
    test.create_json(&adopted).await?;
    test.create_json(&json!({
        "apiVersion": "v1", "kind": "Secret",
        "metadata": {"name": "own-cloudinit", "annotations": {ANNOTATION_ADOPT_BY: "own"}}, "stringData": {"a": "b"},
    }))
    .await?;
    let mut own = machine("own", &json!({"template": "small", "cloudInit": {"userData": "#cloud-config\n"}}));
    if let Some(Value::Object(metadata)) = own.get_mut("metadata") {
        let items = "pvc/own-root,secret/own-cloudinit";
        metadata.insert("annotations".to_owned(), json!({ANNOTATION_ADOPT: items}));
    }
    test.create_json(&own).await?;
    test.wait_until_running("own").await?;
    for labels in [
        test.api::<PersistentVolumeClaim>().get("own-root").await?.metadata.labels,
        test.api::<Secret>().get("own-cloudinit").await?.metadata.labels,
    ] {
        ensure!(labels.unwrap_or_default().contains_key(LABEL_MANAGED_BY), "it was not adopted");
    }

    // The operator itself is not hindered: the life of a Machine, and the repair of its labels.
    test.create_networks(&["net"]).await?;
    let spec = json!({
        "template": "small", "networks": [{"name": "a", "networkName": "net"}],
        "cloudInit": {"userData": "#cloud-config\n"},
    });
    test.create_json(&machine("web", &spec)).await?;
    test.wait_until_running("web").await?;
    let machines: Api<Machine> = Api::namespaced(operator, namespace);
    let edit = Patch::Merge(json!({"spec": {"powerState": "Stopped"}}));
    check_refused(machines.patch("web", &merge, &edit).await, "edit of a Machine", "spec of Machines")?;
    let strip = Patch::Merge(json!({"metadata": {"labels": {LABEL_MANAGED_BY: null}}}));
    test.api::<PersistentVolumeClaim>().patch("web-root", &merge, &strip).await?;
    test.api::<Secret>().patch("web-cloudinit", &merge, &strip).await?;
    test.vms().patch("web", &merge, &strip).await?;
    let is_restored = || async {
        let marked = |labels: &Option<std::collections::BTreeMap<String, String>>| {
            labels.as_ref().is_some_and(|labels| labels.contains_key(LABEL_MANAGED_BY))
        };
        let pvc = test.api::<PersistentVolumeClaim>().get("web-root").await?;
        let secret = test.api::<Secret>().get("web-cloudinit").await?;
        let vm = test.vms().get("web").await?;
        Ok(marked(&pvc.metadata.labels) && marked(&secret.metadata.labels) && marked(&vm.metadata.labels))
    };
    poll_until(MACHINE_PATIENCE, is_restored, || "the labels are restored".to_owned()).await?;
    test.edit_spec("web", &json!({"powerState": "Stopped"})).await?;
    test.wait_for_within(MACHINE_PATIENCE, "web", "Stopped", |web| phase(web) == Some("Stopped")).await?;
    test.delete_machine("web").await?;
    test.wait_until_absent(test.api::<PersistentVolumeClaim>(), "web-root").await
}

/// An operator for all namespaces, on a lab of its own.
async fn two_namespaces_on_one_vlan_do_not_share_a_mac_address(_: Arc<SharedLabs>) -> Result<()> {
    let lab = Lab::start(LabOptions { kubevirt: KubeVirtInstaller::Simulated, ..LabOptions::default() }).await?;
    lab.install(Extension::Multus).await?;
    create_crds(&lab).await?;
    let _operator = start_leader(&lab, "mac-operator", false).await?;
    for namespace in ["mac-a", "mac-b"] {
        create_namespace(&lab, namespace).await?;
        let networks: Api<NetworkConfiguration> = Api::namespaced(lab.client(), namespace);
        let same_segment = network(&format!("of-{namespace}"), &json!({"bridge": "br1", "vlan": 100}))?;
        networks.create(&PostParams::default(), &same_segment).await?;
    }
    let on = |namespace: &str, mac: &str| {
        json!({"template": "small", "networks": [
            {"name": "a", "networkName": format!("of-{namespace}"), "macAddress": mac},
        ]})
    };
    let (mac, other_mac) = ("52:54:00:12:34:56", "52:54:00:12:34:57");
    let create = async |namespace: &str, name: &str, mac: &str| {
        let object = in_namespace(&machine(name, &on(namespace, mac)), namespace);
        manifests::create(&lab.client(), &[object]).await
    };
    let wait = async |namespace: &str, name: &str, reason: &str| {
        let machines: Api<Machine> = Api::namespaced(lab.client(), namespace);
        let has_reason =
            |machine: Option<&Machine>| machine.is_some_and(|machine| ready_reason(machine) == Some(reason));
        lab.wait(reason, MACHINE_PATIENCE, machines, name, has_reason).await
    };
    create("mac-a", "older", other_mac).await?;
    wait("mac-a", "older", "Running").await?;
    create("mac-a", "victim", mac).await?;
    wait("mac-a", "victim", "Running").await?;
    create("mac-b", "thief", mac).await?;
    let thief = wait("mac-b", "thief", "MacAddressInUse").await?.context("the Machine does not exist")?;
    check_diagnosis(&thief, &[mac, "another namespace"])?;
    ensure!(!format!("{:?}", thief.status).contains("victim"), "{:?}", thief.status);

    // An older Machine does not take the address of one that runs.
    let machines: Api<Machine> = Api::namespaced(lab.client(), "mac-a");
    let edit = Patch::Merge(json!({"spec": on("mac-a", mac)}));
    machines.patch("older", &PatchParams::default(), &edit).await?;
    let older = wait("mac-a", "older", "MacAddressInUse").await?.context("the Machine does not exist")?;
    check_diagnosis(&older, &[mac, "victim"])?;
    let victim = machines.get("victim").await?;
    ensure!(ready_reason(&victim) == Some("Running"), "{:?}", victim.status);

    // The guest keeps its address until it restarts with another one, and also when the spec becomes invalid.
    let edited = on("mac-a", "52:54:00:12:34:58");
    for template in ["small", "unknown"] {
        let edit = json!({"spec": {"template": template, "networks": edited.get("networks")}});
        machines.patch("victim", &PatchParams::default(), &Patch::Merge(edit)).await?;
        let is_observed = |machine: Option<&Machine>| machine.is_some_and(is_observed);
        lab.wait("the edit", MACHINE_PATIENCE, machines.clone(), "victim", is_observed).await?;
    }
    // Nothing happens to the Machines that wait for the address.
    tokio::time::sleep(Duration::from_secs(1)).await;
    for (namespace, name) in [("mac-a", "older"), ("mac-b", "thief")] {
        let waiting = wait(namespace, name, "MacAddressInUse").await?.context("the Machine does not exist")?;
        check_diagnosis(&waiting, &[mac])?;
    }
    let thief: Api<Machine> = Api::namespaced(lab.client(), "mac-b");
    thief.delete("thief", &DeleteParams::default()).await?;
    machines.delete("victim", &DeleteParams::default()).await?;
    wait("mac-a", "older", "Running").await?;
    lab.stop().await
}

/// An operator for all namespaces, on a lab of its own (review R5, R6, R7, B30).
async fn a_slow_namespace_a_busy_server_and_a_flood_do_not_stop_the_others(_: Arc<SharedLabs>) -> Result<()> {
    let lab = Lab::start(LabOptions { kubevirt: KubeVirtInstaller::Simulated, ..LabOptions::default() }).await?;
    create_crds(&lab).await?;
    let operator = start_leader(&lab, "fair-operator", true).await?;
    for namespace in ["slow", "fast"] {
        create_namespace(&lab, namespace).await?;
    }
    let create = async |namespace: &str, name: &str| {
        let object = in_namespace(&machine(name, &json!({"template": "small"})), namespace);
        manifests::create(&lab.client(), &[object]).await
    };
    let fast: Api<Machine> = Api::namespaced(lab.client(), "fast");
    let wait = async |name: &str, reason: &str, patience: Duration| {
        let has_reason =
            |machine: Option<&Machine>| machine.is_some_and(|machine| ready_reason(machine) == Some(reason));
        let found = lab.wait(reason, patience, fast.clone(), name, has_reason).await;
        found.with_context(|| format!("Machine {name}: {}", operator.log_text()))
    };
    create("fast", "before").await?;
    wait("before", "Running", MACHINE_PATIENCE).await?;

    // R6 and B30: five workers, and an admission of ten seconds in one namespace. One after the other, twenty Machines
    // would occupy the workers for forty seconds.
    let vms = |verb| Match::verb(verb).user_agent("kubevirt-operator/").resource("virtualmachines");
    let slow =
        ProxyRule::always(vms(RequestVerb::Create).namespace("slow"), ProxyFault::Delay(Duration::from_secs(10)));
    let slow = lab.proxy().add(slow);
    for number in 0..20 {
        create("slow", &format!("m{number}")).await?;
    }
    let is_slow = || async { Ok(slow.hits() >= 2) };
    poll_until(MACHINE_PATIENCE, is_slow, || "creates of VMs are delayed".to_owned()).await?;
    create("fast", "web").await?;
    wait("web", "Running", Duration::from_secs(15)).await?;
    slow.remove();

    // R7: connections that send nothing do not keep the kubelet's probe out.
    let mut flood = Vec::new();
    for _ in 0..300 {
        flood.push(tokio::net::TcpStream::connect((operator.address(), 8081)).await?);
    }
    let probe = tokio::time::timeout(Duration::from_secs(5), operator.get(8081, "/healthz")).await;
    let (status, text) = probe.context("the probe gets no response")??;
    ensure!(status == 200, "{status}: {text}");
    drop(flood);

    // R5: a server that asks for five seconds of peace gets them, whatever happens to the Machine's objects.
    let refuse = ProxyFault::Answer { status: 429, retry_after: Some(5) };
    let refuse = lab.proxy().add(ProxyRule::always(vms(RequestVerb::Patch).namespace("fast").name("web"), refuse));
    let stop = Patch::Merge(json!({"spec": {"powerState": "Stopped"}}));
    fast.patch("web", &PatchParams::default(), &stop).await?;
    let is_refused = || async { Ok(refuse.hits() >= 1) };
    poll_until(MACHINE_PATIENCE, is_refused, || "the write is refused".to_owned()).await?;
    for number in 0..20 {
        let poke = Patch::Merge(json!({"metadata": {"labels": {"poke": number.to_string()}}}));
        fast.patch("web", &PatchParams::default(), &poke).await?;
        // The events must arrive one by one, within the five seconds.
        tokio::time::sleep(Duration::from_millis(150)).await;
    }
    ensure!(refuse.hits() <= 2, "{} writes in three seconds", refuse.hits());
    refuse.remove();
    wait("web", "Stopped", MACHINE_PATIENCE).await?;
    lab.stop().await
}
