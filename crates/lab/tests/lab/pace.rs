//! The delays of a lab have the effect that their names say.

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::{
    core::v1::{Secret, Service},
    discovery::v1::EndpointSlice,
};
use kube::{
    Api,
    api::{DeleteParams, ListParams, Patch, PatchParams, PostParams},
};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};
use vitivirt_lab::{
    CLASS_STANDARD, DelayRange, Lab, LabOptions, OwnProgram,
    harness::{SharedLabs, Suite},
    tests,
};

use crate::{
    nested::{self, SERVED_PORT},
    simulators::{TIMEOUT, create_pvc, is_ready, pods, wait_for_account, wait_for_pod, wait_for_pvc},
};

pub(crate) fn add(suite: &mut Suite) {
    tests!(
        suite;
        pods_endpoints_and_pvcs_of_a_slow_lab_lag,
        a_mounted_secret_is_updated_after_the_delay_of_the_node,
        a_frozen_pod_keeps_its_secret_until_it_is_created_again,
    );
}

const LAG: Duration = Duration::from_secs(2);

async fn pods_endpoints_and_pvcs_of_a_slow_lab_lag(_: Arc<SharedLabs>) -> Result<()> {
    let mut options = LabOptions {
        nodes: 1,
        own_programs: vec![server()?],
        endpoints_lag: LAG,
        pvcs_bind_after: LAG.into(),
        ..LabOptions::default()
    };
    options.pods.starts_after_ready = LAG.into();
    let ready_after = DelayRange::millis(1_000, 3_000);
    options.pods.ready_after = ready_after;
    let lab = Lab::start(options).await?;

    let created = Instant::now();
    create_pvc(&lab, "late", CLASS_STANDARD).await?;
    wait_for_pvc(&lab, "late", "Bound").await?;
    ensure!(created.elapsed() >= LAG, "the PVC was bound after {:?}", created.elapsed());

    // A new Service is processed at once. Only a change of a pod lags.
    let service = json!({
        "metadata": {"name": "late"},
        "spec": {"selector": {"app": "late"}, "ports": [{"port": SERVED_PORT}]},
    });
    let services: Api<Service> = Api::namespaced(lab.client(), "default");
    services.create(&PostParams::default(), &serde_json::from_value(service)?).await?;
    let created = Instant::now();
    create_server(&lab, "late", &json!({})).await?;
    wait_for_pod(&lab, "late", is_ready).await?;
    let ready = Instant::now();
    ensure!(created.elapsed() >= ready_after.from, "the pod was ready after {:?}", created.elapsed());
    let version = pods(&lab).get("late").await?.metadata.resource_version;
    let address = address_of(&lab, "late").await?;
    ensure!(TcpStream::connect(address).await.is_err(), "the pod listens as soon as it is ready");
    let (listens_after, in_endpoints_after) =
        tokio::try_join!(after(ready, || listens(address)), after(ready, || in_endpoints(&lab, address.ip())))?;
    // The watch may report the readiness of the pod a little late.
    let expected = LAG.mul_f64(0.8)..LAG * 4;
    ensure!(expected.contains(&listens_after), "the pod listens {listens_after:?} after it is ready");
    ensure!(
        expected.contains(&in_endpoints_after),
        "the endpoint exists {in_endpoints_after:?} after the pod is ready"
    );
    let unchanged = pods(&lab).get("late").await?.metadata.resource_version == version;
    ensure!(unchanged, "the pod must stay ready until it listens");
    lab.stop().await
}

async fn a_mounted_secret_is_updated_after_the_delay_of_the_node(_: Arc<SharedLabs>) -> Result<()> {
    let mut options = LabOptions { nodes: 1, own_programs: vec![server()?], ..LabOptions::default() };
    options.pods.volumes_updated_after = LAG.into();
    let lab = Lab::start(options).await?;
    create_server(&lab, "reader", &json!({"secret": {"secretName": "served"}})).await?;
    // Without its Secret, the pod cannot start.
    write_secret(&lab, "one").await?;
    wait_for_pod(&lab, "reader", is_ready).await?;
    let address = address_of(&lab, "reader").await?;
    ensure!(served(address).await? == "one", "the pod does not serve its Secret");
    let changed = Instant::now();
    write_secret(&lab, "two").await?;
    let updated_after = after(changed, || async { Ok(served(address).await? == "two") }).await?;
    ensure!(updated_after >= LAG, "the file was updated after {updated_after:?}");
    lab.stop().await
}

async fn a_frozen_pod_keeps_its_secret_until_it_is_created_again(_: Arc<SharedLabs>) -> Result<()> {
    let lab = Lab::start(LabOptions { nodes: 1, own_programs: vec![server()?], ..LabOptions::default() }).await?;
    write_secret(&lab, "one").await?;
    let volume = json!({"secret": {"secretName": "served"}});
    for name in ["frozen", "other"] {
        create_server(&lab, name, &volume).await?;
        wait_for_pod(&lab, name, is_ready).await?;
    }
    let (frozen, other) = (address_of(&lab, "frozen").await?, address_of(&lab, "other").await?);
    ensure!(lab.freeze_volumes("default", "frozen").await? == ["frozen"], "only one pod has this name");
    for content in ["two", "three"] {
        write_secret(&lab, content).await?;
        after(Instant::now(), || async { Ok(served(other).await? == content) }).await?;
        ensure!(served(frozen).await? == "one", "the frozen pod was updated");
    }
    pods(&lab).delete("frozen", &DeleteParams::default().grace_period(0)).await?;
    lab.wait("no pod", TIMEOUT, pods(&lab), "frozen", |pod| pod.is_none()).await?;
    create_server(&lab, "frozen", &volume).await?;
    wait_for_pod(&lab, "frozen", is_ready).await?;
    let address = address_of(&lab, "frozen").await?;
    ensure!(served(address).await? == "three", "a new pod mounts the newest Secret");
    write_secret(&lab, "four").await?;
    after(Instant::now(), || async { Ok(served(address).await? == "four") }).await?;
    lab.stop().await
}

async fn write_secret(lab: &Lab, content: &str) -> Result<()> {
    let secrets: Api<Secret> = Api::namespaced(lab.client(), "default");
    let secret =
        json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "served"}, "stringData": {FILE: content}});
    secrets.patch("served", &PatchParams::apply("test"), &Patch::Apply(secret)).await?;
    Ok(())
}

/// What a pod serves.
async fn served(address: SocketAddr) -> Result<String> {
    let mut stream = TcpStream::connect(address).await?;
    stream.write_all(b"GET / HTTP/1.1\r\n\r\n").await?;
    let mut response = String::new();
    stream.read_to_string(&mut response).await?;
    Ok(response.rsplit("\r\n").next().unwrap_or_default().to_owned())
}

/// A program that serves one file of its pod.
pub(crate) fn server() -> Result<OwnProgram> {
    Ok(OwnProgram { image: IMAGE.to_owned(), file: std::env::current_exe().context("finding this program")? })
}

const IMAGE: &str = "example.org/server";
/// Where the pod mounts its volume.
const FOLDER: &str = "/etc/served";
const FILE: &str = "file";

/// A pod that serves `file` of a volume.
pub(crate) async fn create_server(lab: &Lab, name: &str, volume: &Value) -> Result<()> {
    let mut volumes = vec![json!({"name": "served"})];
    if let (Some(Value::Object(served)), Value::Object(source)) = (volumes.first_mut(), volume) {
        served.extend(source.clone());
    }
    let pod = json!({
        "metadata": {"name": name, "labels": {"app": name}},
        "spec": {
            "containers": [{
                "name": "server",
                "image": IMAGE,
                "env": [
                    {"name": nested::TASK, "value": nested::SERVE_FILE},
                    {"name": nested::FILE, "value": format!("{FOLDER}/{FILE}")},
                    {"name": nested::ADDRESS, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
                ],
                "ports": [{"containerPort": SERVED_PORT}],
                "readinessProbe": {"httpGet": {"port": SERVED_PORT}},
                "volumeMounts": [{"name": "served", "mountPath": FOLDER}],
            }],
            "volumes": volumes,
        },
    });
    wait_for_account(lab).await?;
    pods(lab).create(&PostParams::default(), &serde_json::from_value(pod)?).await?;
    Ok(())
}

pub(crate) async fn address_of(lab: &Lab, pod: &str) -> Result<SocketAddr> {
    let address =
        pods(lab).get(pod).await?.status.and_then(|status| status.pod_ip).context("the pod has no address")?;
    Ok(SocketAddr::new(address.parse()?, SERVED_PORT))
}

async fn listens(address: SocketAddr) -> Result<bool> {
    Ok(TcpStream::connect(address).await.is_ok())
}

async fn in_endpoints(lab: &Lab, address: IpAddr) -> Result<bool> {
    let slices: Api<EndpointSlice> = Api::namespaced(lab.client(), "default");
    let slices = slices.list(&ListParams::default().labels("kubernetes.io/service-name=late")).await?;
    let ready = slices
        .items
        .iter()
        .flat_map(|slice| &slice.endpoints)
        .filter(|endpoint| endpoint.conditions.as_ref().and_then(|conditions| conditions.ready) == Some(true));
    Ok(ready.flat_map(|endpoint| &endpoint.addresses).any(|found| *found == address.to_string()))
}

/// The time from `start` until `condition` is true.
pub(crate) async fn after<F>(start: Instant, condition: impl Fn() -> F) -> Result<Duration>
where
    F: Future<Output = Result<bool>>,
{
    while !condition().await? {
        ensure!(start.elapsed() < TIMEOUT, "nothing happened within {TIMEOUT:?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    Ok(start.elapsed())
}
