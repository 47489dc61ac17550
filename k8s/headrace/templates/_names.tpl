{{/* Names, labels, the run's file and the image. */}}

{{- define "headrace.fullname" -}}
{{- .Release.Name | replace "." "-" | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{/* The run's sections, as a map. */}}
{{- define "headrace.run" -}}
{{- $run := fromYaml .Values.run -}}
{{- if hasKey $run "Error" -}}
{{- fail (printf "run: not valid YAML: %s" (get $run "Error")) -}}
{{- end -}}
{{- range $section := list "run" "model" "prompts" "reward" -}}
{{- if not (kindIs "map" (get $run $section)) -}}
{{- fail (printf "run: section %q is missing; expected the text of a run's YAML file (--set-file run=run.yaml)" $section) -}}
{{- end -}}
{{- end -}}
{{- toYaml $run -}}
{{- end -}}

{{- define "headrace.runId" -}}
{{- $run := include "headrace.run" . | fromYaml -}}
{{- $id := .Values.runId | default $run.run.id | default (.Release.Name | replace "." "-") | toString -}}
{{- if not (regexMatch "^[a-z0-9][a-z0-9-]{0,95}$" $id) -}}
{{- fail (printf "run.id of the file is %q; expected a-z, 0-9 and '-', at most 96 of them" $id) -}}
{{- end -}}
{{- $id -}}
{{- end -}}

{{/* What selects a component's pods. Argument: list of the root context and the component. */}}
{{- define "headrace.selector" -}}
app.kubernetes.io/name: headrace
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{/* Of pods: nothing that changes with a version, or an upgrade would restart those that it does not concern. */}}
{{- define "headrace.podLabels" -}}
{{ include "headrace.selector" . }}
app.kubernetes.io/part-of: headrace
{{- end -}}

{{- define "headrace.labels" -}}
{{- $root := index . 0 -}}
{{ include "headrace.podLabels" . }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_" }}
{{- end -}}

{{/* Kueue takes the whole workload when it carries the queue's name. */}}
{{- define "headrace.kueue" -}}
{{- with .Values.kueue }}
{{- if .queue }}
kueue.x-k8s.io/queue-name: {{ .queue }}
{{- with .priorityClass }}
kueue.x-k8s.io/priority-class: {{ . }}
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "headrace.image" -}}
{{- $image := .Values.image -}}
{{- $tag := $image.tag | default (printf "%s%s" .Chart.AppVersion (ternary "-cpu" "" (eq .Values.device "cpu"))) -}}
{{- $image.repository }}{{ ternary (printf "@%s" $image.digest) (printf ":%s" $tag) (ne $image.digest "") -}}
{{- end -}}

{{/* "yes" where an optional kind is wanted. Argument: root context, flag, API version. */}}
{{- define "headrace.wanted" -}}
{{- $root := index . 0 -}}{{- $flag := index . 1 | toString -}}{{- $api := index . 2 -}}
{{- if or (eq $flag "true") (and (eq $flag "auto") (or ($root.Capabilities.APIVersions.Has $api) (has $api $root.Values.apiVersions))) -}}
yes
{{- end -}}
{{- end -}}

{{- define "headrace.redisSecret" -}}
{{- .Values.redis.secret | default (printf "%s-redis" (include "headrace.fullname" .)) -}}
{{- end -}}

{{/* Who owns the generators. */}}
{{- define "headrace.generatorKind" -}}
{{- ternary "LeaderWorkerSet" "Deployment" .Values.generator.multiHost.enabled -}}
{{- end -}}

{{/* Roles that talk to Redis under a name of their own; the autoscaler only reads. */}}
{{- define "headrace.role" -}}
{{- get (dict "coordinator" "broker" "autoscaler" "reader") . | default . -}}
{{- end -}}

{{/* Pods of this run, for a NetworkPolicy. Argument: root context, list of components. */}}
{{- define "headrace.peers" -}}
- podSelector:
    matchLabels:
      app.kubernetes.io/name: headrace
      app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
    matchExpressions:
      - {key: app.kubernetes.io/component, operator: In, values: {{ toJson (index . 1) }}}
{{- end -}}
