{{- /* `helm upgrade --reuse-values` renders with the values of the older chart, which lack newer ones. Sets each missing one to
     its default. Maps that are not groups stay as they are: in them, users
     remove an entry with null. */}}
{{- define "virt-operator.setDefaults" -}}
{{- $groups := list "crds" "image" "podDisruptionBudget" "priorityClass" "prometheusRule" }}
{{- range $name, $default := .Files.Get "files/defaults.yaml" | fromYaml }}
{{- $value := index $.Values $name }}
{{- if kindIs "invalid" $value }}
{{- $_ := set $.Values $name $default }}
{{- else if has $name $groups }}
{{- range $key, $default := $default }}
{{- if kindIs "invalid" (index $value $key) }}
{{- $_ := set $value $key $default }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{- define "virt-operator.labels" -}}
app.kubernetes.io/part-of: vitivirt
app.kubernetes.io/instance: {{ .Release.Name }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "virt-operator.image" -}}
{{- with .Values.image }}
{{- if .digest }}{{ .repository }}@{{ .digest }}{{ else }}{{ .repository }}:{{ .tag | default ($.Chart.Version | replace "+" "_") }}{{ end }}
{{- end }}
{{- end }}

{{- /* An object of the generated manifests: with the labels of the release, in the namespace of the release. */}}
{{- define "virt-operator.object" -}}
{{- $object := .object }}
{{- $_ := set $object.metadata "labels" (merge (include "virt-operator.labels" .root | fromYaml) (default dict $object.metadata.labels)) }}
{{- if $object.metadata.namespace }}
{{- $_ := set $object.metadata "namespace" .root.Release.Namespace }}
{{- end }}
{{- range $object.subjects }}
{{- $_ := set . "namespace" $.root.Release.Namespace }}
{{- end }}
{{- toYaml $object }}
{{- end }}
