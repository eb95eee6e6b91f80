//! `collect-debug-info`: what a bug report needs, in one archive. Secrets are never read. What the user is not allowed to
//! read is listed in `errors.txt`.

use std::{io::Write, os::unix::fs::OpenOptionsExt, process::ExitCode, time::SystemTime};

use anyhow::Context;
use flate2::{Compression, write::GzEncoder};
use k8s_openapi::{
    api::{
        core::v1::{Event, PersistentVolumeClaim, Pod},
        storage::v1::StorageClass,
    },
    apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition,
};
use kube::{
    Api, Client, ResourceExt,
    api::{DynamicObject, ListParams, LogParams},
};
use vitivirt_api::{
    ApiResource,
    kubevirt::KubeVirt,
    machine::{Machine, NetworkConfiguration},
    resources::{network_attachment_resource, virtual_machine_instance_resource, virtual_machine_resource},
};
use vitivirt_cli::{CommandResult, print, to_yaml, version};
use vitivirt_runtime::root_cause::root_cause;

use crate::{arguments::DebugInfoArguments, cluster::NamespaceClient, redact::redact};

const FOLDER: &str = "vmachine-debug-info";
const PAGE: u32 = 200;
/// The newest lines of the log of each pod.
const LOG_LINES: i64 = 20_000;
const MANAGER: &str = "kubevirt-operator";

pub(crate) async fn run(arguments: &DebugInfoArguments) -> CommandResult<ExitCode> {
    let cluster = NamespaceClient::connect(&arguments.namespace).await?;
    let namespace = (!arguments.all_namespaces).then_some(cluster.namespace.as_str());
    let mut collection = Collection { client: cluster.client.clone(), files: Vec::new(), errors: Vec::new() };
    collection.add("version.txt", format!("kubectl-vmachine {}\n", version()).into_bytes());
    collection.objects(namespace, &arguments.operator_namespace).await;
    collection.logs(&arguments.operator_namespace).await;
    let (count, errors) = (collection.files.len(), collection.errors.len());
    let archive = collection.archive().context("writing the archive")?;
    if arguments.filename.as_os_str() == "-" {
        std::io::stdout().lock().write_all(&archive).context("writing to standard output")?;
        return Ok(ExitCode::SUCCESS);
    }
    let file = arguments.filename.display();
    // Only the user may read it.
    let mut options = std::fs::OpenOptions::new();
    options.write(true).create(true).truncate(true).mode(0o600);
    let written = options.open(&arguments.filename).and_then(|mut open| open.write_all(&archive));
    written.with_context(|| format!("writing {file}"))?;
    let missing = if errors == 0 { String::new() } else { format!("; {errors} could not be read, see errors.txt") };
    print(&format!("{count} files written to {file}{missing}\nReview them before you share the file.\n"))?;
    Ok(ExitCode::SUCCESS)
}

struct Collection {
    client: Client,
    files: Vec<(String, Vec<u8>)>,
    errors: Vec<String>,
}

impl Collection {
    fn add(&mut self, name: &str, content: Vec<u8>) {
        self.files.push((name.to_owned(), content));
    }

    async fn objects(&mut self, namespace: Option<&str>, operator: &str) {
        for resource in [
            ApiResource::erase::<Machine>(&()),
            ApiResource::erase::<NetworkConfiguration>(&()),
            virtual_machine_resource(),
            virtual_machine_instance_resource(),
            ApiResource::erase::<Pod>(&()),
            ApiResource::erase::<PersistentVolumeClaim>(&()),
            network_attachment_resource(),
            ApiResource::erase::<Event>(&()),
        ] {
            self.list(&format!("{}.yaml", resource.plural), &resource, namespace).await;
        }
        for resource in [ApiResource::erase::<StorageClass>(&()), ApiResource::erase::<KubeVirt>(&())] {
            self.list(&format!("cluster/{}.yaml", resource.plural), &resource, None).await;
        }
        let crds = ApiResource::erase::<CustomResourceDefinition>(&());
        self.names("cluster/customresourcedefinitions.txt", &crds).await;
        if namespace.is_some_and(|namespace| namespace != operator) {
            self.list("operator/pods.yaml", &ApiResource::erase::<Pod>(&()), Some(operator)).await;
        }
    }

    fn api(&self, resource: &ApiResource, namespace: Option<&str>) -> Api<DynamicObject> {
        match namespace {
            Some(namespace) => Api::namespaced_with(self.client.clone(), namespace, resource),
            None => Api::all_with(self.client.clone(), resource),
        }
    }

    async fn list(&mut self, file: &str, resource: &ApiResource, namespace: Option<&str>) {
        let api = self.api(resource, namespace);
        let mut parameters = ListParams::default().limit(PAGE);
        let mut objects = Vec::new();
        loop {
            let list = match api.list(&parameters).await {
                Ok(list) => list,
                Err(error) => return self.error(&resource.plural, &error),
            };
            for object in list.items {
                let Ok(mut json) = serde_json::to_value(object) else { continue };
                redact(&mut json);
                objects.push(json);
            }
            match list.metadata.continue_.filter(|token| !token.is_empty()) {
                Some(token) => parameters.continue_token = Some(token),
                None => break,
            }
        }
        match to_yaml(&objects) {
            Ok(text) => self.add(file, text.into_bytes()),
            Err(error) => self.errors.push(format!("{}: {error}", resource.plural)),
        }
    }

    /// CRDs are large, and their names say what is installed.
    async fn names(&mut self, file: &str, resource: &ApiResource) {
        match self.api(resource, None).list_metadata(&ListParams::default()).await {
            Ok(list) => {
                let names: Vec<String> = list.items.iter().map(ResourceExt::name_any).collect();
                self.add(file, format!("{}\n", names.join("\n")).into_bytes());
            }
            Err(error) => self.error(&resource.plural, &error),
        }
    }

    /// The logs of the operator, also of the process before the last restart. They have no user data.
    async fn logs(&mut self, namespace: &str) {
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), namespace);
        let found = pods.list(&ListParams::default().labels(&format!("app.kubernetes.io/name={MANAGER}"))).await;
        let found = match found {
            Ok(found) => found.items,
            Err(error) => return self.error(&format!("pods of {namespace}"), &error),
        };
        for pod in found {
            let name = pod.name_any();
            let restarted = pod.status.iter().flat_map(|status| status.container_statuses.iter().flatten());
            let restarted = restarted.into_iter().any(|container| container.restart_count > 0);
            for previous in [false, true].into_iter().filter(|previous| !previous || restarted) {
                let parameters = LogParams { previous, tail_lines: Some(LOG_LINES), ..LogParams::default() };
                match pods.logs(&name, &parameters).await {
                    Ok(log) => {
                        let file = format!("operator/{name}{}.log", if previous { ".previous" } else { "" });
                        self.add(&file, log.into_bytes());
                    }
                    Err(error) => self.error(&format!("the log of pod {name}"), &error),
                }
            }
        }
    }

    fn error(&mut self, what: &str, error: &kube::Error) {
        let cause = match error {
            // Of an API that is not installed there is nothing to collect.
            kube::Error::Api(status) if status.code == 404 => "not installed".to_owned(),
            kube::Error::Api(status) => status.message.clone(),
            error => root_cause(error),
        };
        self.errors.push(format!("{what}: {cause}"));
    }

    fn archive(mut self) -> anyhow::Result<Vec<u8>> {
        if !self.errors.is_empty() {
            let errors = format!("{}\n", self.errors.join("\n"));
            self.add("errors.txt", errors.into_bytes());
        }
        #[expect(clippy::disallowed_methods, reason = "files of an archive have a time")]
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
        let mut archive = tar::Builder::new(GzEncoder::new(Vec::new(), Compression::default()));
        for (name, content) in &self.files {
            let mut header = tar::Header::new_gnu();
            header.set_size(content.len().try_into()?);
            header.set_mode(0o600);
            header.set_mtime(now);
            archive.append_data(&mut header, format!("{FOLDER}/{name}"), content.as_slice())?;
        }
        Ok(archive.into_inner()?.finish()?)
    }
}
