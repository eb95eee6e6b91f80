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
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "kubevirt-operator.image" -}}
{{- with .Values.image }}
{{- if .digest }}{{ .repository }}@{{ .digest }}{{ else }}{{ .repository }}:{{ default $.Chart.AppVersion .tag }}{{ end }}
{{- end }}
{{- end }}
