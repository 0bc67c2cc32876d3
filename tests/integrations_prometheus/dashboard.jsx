// Draws docs/operate/grafana.json with the panel components that Grafana publishes, from what a Prometheus answers.
// draw_dashboard.py gives the address of the Prometheus, the range of time and the value of $window.
import { useEffect, useState } from 'react';
import { createRoot } from 'react-dom/client';
import {
  FieldConfigOptionsRegistry, FieldType, applyFieldOverrides, createTheme, dateTime, getFieldDisplayValues,
} from '@grafana/data';
import { BigValue, GlobalStyles, PanelChrome, ThemeContext, TimeSeries } from '@grafana/ui';
import dashboard from '../../docs/operate/grafana.json';

const { prometheus, from, to, window: pushesOf } = Object.fromEntries(new URLSearchParams(location.search));
const theme = createTheme({ colors: { mode: 'light' } });
const [WIDTH, GAP, CELL] = [1600, 8, 30];
const STEP_S = 15;

// What Grafana's own panels set where a dashboard says nothing.
const COLOR = { stat: { mode: 'thresholds' }, timeseries: { mode: 'palette-classic' } };
const CUSTOM = {
  drawStyle: 'line', lineInterpolation: 'linear', lineWidth: 1, fillOpacity: 0, gradientMode: 'none', pointSize: 5,
  showPoints: 'auto', spanNulls: false, axisPlacement: 'auto', stacking: { mode: 'none' },
};

const option = (path, isCustom) => ({
  id: isCustom ? `custom.${path}` : path, path, isCustom, name: path, process: (value) => value, shouldApply: () => true,
});
const registry = new FieldConfigOptionsRegistry(() => [
  ...['unit', 'min', 'decimals', 'color', 'thresholds'].map((path) => option(path, false)),
  ...Object.keys(CUSTOM).map((path) => option(path, true)),
]);

async function ask({ expr, legendFormat }) {
  const query = expr.replaceAll('$window', pushesOf);
  const parameters = new URLSearchParams({ query, start: from, end: to, step: STEP_S });
  const answer = await (await fetch(`http://${prometheus}/api/v1/query_range?${parameters}`)).json();
  const times = Array.from({ length: Math.floor((to - from) / STEP_S) + 1 }, (_, i) => Number(from) + i * STEP_S);
  return answer.data.result.map(({ metric, values }) => {
    const found = new Map(values);
    const numbers = times.map((time) => Number(found.get(time))).map((value) => (Number.isFinite(value) ? value : null));
    const displayNameFromDS = legendFormat.replace(/{{(\w+)}}/g, (_, label) => metric[label]) || expr;
    return {
      length: times.length,
      fields: [
        { name: 'Time', type: FieldType.time, config: {}, values: times.map((time) => time * 1000) },
        { name: 'Value', type: FieldType.number, labels: metric, values: numbers, config: { displayNameFromDS } },
      ],
    };
  });
}

const DRAW = {
  timeseries({ options }, frames, { noValue }, width, height) {
    if (!frames.length) return noValue ?? 'No data';
    const timeRange = { from: dateTime(from * 1000), to: dateTime(to * 1000) };
    return <TimeSeries timeZone="utc" legend={options.legend} {...{ frames, timeRange, width, height }} />;
  },
  stat({ options, fieldConfig }, data, _, width, height) {
    const asked = { fieldConfig, data, theme, sparkline: options.graphMode === 'area', replaceVariables: (text) => text };
    const [{ display, sparkline }] = getFieldDisplayValues({ ...asked, reduceOptions: options.reduceOptions });
    return <BigValue textMode="auto" justifyMode="auto" value={display} {...{ ...options, sparkline, theme, width, height }} />;
  },
};

function Panel({ panel, series }) {
  const { x, y, w, h } = panel.gridPos;
  const column = (WIDTH - GAP) / 24;
  const { defaults, overrides } = panel.fieldConfig;
  const frames = applyFieldOverrides({
    data: series, theme, timeZone: 'utc', fieldConfigRegistry: registry, replaceVariables: (text) => text,
    fieldConfig: { overrides, defaults: { color: COLOR[panel.type], ...defaults, custom: { ...CUSTOM, ...defaults.custom } } },
  });
  return (
    <div style={{ position: 'absolute', left: GAP + x * column, top: GAP + y * (CELL + GAP) }}>
      <PanelChrome title={panel.title} width={w * column - GAP} height={h * (CELL + GAP) - GAP}>
        {(width, height) => DRAW[panel.type](panel, frames, defaults, width, height)}
      </PanelChrome>
    </div>
  );
}

function Dashboard() {
  const [answers, setAnswers] = useState([]);
  useEffect(() => {
    Promise.all(dashboard.panels.map((panel) => Promise.all(panel.targets.map(ask)))).then(setAnswers);
  }, []);
  return (
    <ThemeContext.Provider value={theme}>
      <GlobalStyles />
      {answers.map((found, i) => <Panel key={i} panel={dashboard.panels[i]} series={found.flat()} />)}
    </ThemeContext.Provider>
  );
}

createRoot(document.getElementById('root')).render(<Dashboard />);
