{{- /* `helm upgrade --reuse-values` renders with the values of the older chart, which lack newer ones. Sets each missing one to
     its default. Maps that are not groups stay as they are: in them, users
     remove an entry with null. */}}
{{- define "kubevirt-operator.setDefaults" -}}
{{- $groups := list "crds" "dashboards" "image" "metrics" "metrics.secure" "networkPolicy" "podDisruptionBudget" "policies" "prometheusRule" "rbac" "serviceAccount" "serviceMonitor" }}
{{- $defaults := .Files.Get "files/defaults.yaml" | fromYaml }}
{{- include "kubevirt-operator.setMissing" (dict "values" .Values "defaults" $defaults "groups" $groups "prefix" "") }}
{{- end }}

{{- define "kubevirt-operator.setMissing" -}}
{{- range $name, $default := .defaults }}
{{- $path := printf "%s%s" $.prefix $name }}
{{- $value := index $.values $name }}
{{- if kindIs "invalid" $value }}
{{- $_ := set $.values $name $default }}
{{- else if has $path $.groups }}
{{- include "kubevirt-operator.setMissing" (dict "values" $value "defaults" $default "groups" $.groups "prefix" (printf "%s." $path)) }}
{{- end }}
{{- end }}
{{- end }}

{{- define "kubevirt-operator.name" -}}
kubevirt-operator-controller-manager
{{- end }}

{{- define "kubevirt-operator.serviceAccount" -}}
{{- if .Values.serviceAccount.create }}
{{- default (include "kubevirt-operator.name" .) .Values.serviceAccount.name }}
{{- else }}
{{- required "serviceAccount.name: required if serviceAccount.create is false" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{- define "kubevirt-operator.selector" -}}
app.kubernetes.io/name: kubevirt-operator
app.kubernetes.io/component: manager
{{- end }}

{{- define "kubevirt-operator.labels" -}}
{{ include "kubevirt-operator.selector" . }}
app.kubernetes.io/part-of: vitivirt
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/instance: {{ .Release.Name }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "kubevirt-operator.image" -}}
{{- with .Values.image }}
{{- if .digest }}{{ .repository }}@{{ .digest }}{{ else }}{{ .repository }}:{{ .tag | default ($.Chart.Version | replace "+" "_") }}{{ end }}
{{- end }}
{{- end }}

{{- /* Operators that watch one namespace each can share a cluster, so their objects without a namespace differ in name. */}}
{{- define "kubevirt-operator.nameInCluster" -}}
{{- if .root.Values.watchNamespace }}{{ .name }}-{{ .root.Release.Namespace }}{{ else }}{{ .name }}{{ end }}
{{- end }}

{{- /* Whether clients need a permission to read the metrics. */}}
{{- define "kubevirt-operator.authorizesMetrics" -}}
{{- if and .Values.metrics.secure.enabled .Values.metrics.secure.authorization }}true{{ end }}
{{- end }}
